"""One optimizer step: forward and backward over the micro-batches of a batch, then the update.

A batch is the samples of one optimizer step. Its gradient is Σ totals ÷ Σ counts over all micro-batches, not
a mean of means. Each micro-batch contributes ``total ÷ D``, with one divisor D for the whole batch. Once N,
the sum of the counts, is known, the gradient is multiplied by D ÷ N.

- If the loss is a mean over samples, N is known before the step and D = N.
- For a `Loss`, and in 16 bits, D is a power of two near the samples, so that dividing by D rounds nothing.
- For several terms, N differs by term, so each N must be known before the first backward pass: the data tell
  it (``Workload(counts=…)``).
- A `WholeBatchLoss` is the loss of the batch already; see `autobatch.step.whole_batch`.

The host waits for the device once per batch, after the last backward pass. A loss scale waits once more, in
the step. The probe, the trials, the traced footprint and the training loop all run this code, so what is
predicted and probed is what trains.
"""

from __future__ import annotations

import math

import torch

from autobatch.core.errors import InputError
from autobatch.core.records import Record
from autobatch.step.gradients import differentiate, norm_of
from autobatch.step.loss import StepTotals, add_loss, divisor_and_items, read_totals, weigh_loss
from autobatch.step.train_state import MicroBatches, TrainState, precision_context
from autobatch.step.whole_batch import accumulate_whole
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.user_code import mark_user_error, user_code


class StepResult(Record, frozen=True, kw_only=True):
    """The result of one batch, with or without an applied step."""

    loss: float
    """Mean over everything that the batch counted; NaN if it counted nothing."""
    count: float
    """Items counted (samples if the loss is a mean over samples)."""
    applied: bool
    """False if no optimizer stepped: an overflow, a non-finite value, or nothing counted."""
    grad_norm: float
    """Norm of the batch's gradient before clipping."""
    stepped: tuple[bool, ...]
    """For each optimizer, True if it stepped."""
    terms: dict[str, float] = {}
    """Mean of each of several terms that counted anything; they add up to ``loss``."""


def train_step(train_state: TrainState, micro_batches: MicroBatches, samples: int) -> StepResult:
    """Take one optimizer step over all micro-batches of a batch; see `accumulate` and `finish`."""
    return finish(train_state, accumulate(train_state, micro_batches, samples))


def accumulate(train_state: TrainState, micro_batches: MicroBatches, samples: int) -> StepTotals:
    """Run the micro-batches forward and backward, and accumulate their gradients.

    Args:
        train_state: the model and its optimizer.
        micro_batches: each micro-batch, on the device, with its number of samples. A `WholeBatchLoss`
            iterates over them twice (`autobatch.step.train_state.Passes`).
        samples: samples of the whole batch, over all ranks.
    """
    totals = StepTotals(samples=samples)
    train_state.buffers.take()
    with train_state.gradients.summed_apart():
        if isinstance(train_state.loss, WholeBatchLoss):
            accumulate_whole(train_state, totals, micro_batches)
        else:
            _accumulate_parts(train_state, totals, micro_batches)
    return totals


def _accumulate_parts(train_state: TrainState, totals: StepTotals, micro_batches: MicroBatches) -> None:
    """Run each micro-batch forward and backward, and add it to the totals."""
    context = precision_context(train_state.device, train_state.precision)
    part = "data"
    try:
        for batch, size in micro_batches:
            part = "loss"
            train_state.meter.mark("forward")
            # Entered anew for each: it holds the weights in 16 bits until it is left.
            with context:
                loss = train_state.loss(train_state.model, batch)
                value, weight = weigh_loss(totals, loss, size, train_state.counts)
            # From here on the micro-batch lives only as far as autograd has saved it.
            del batch, loss
            part = "the backward pass of its loss"
            train_state.meter.mark("backward")
            differentiate(train_state.scaler.scale(value), weight)
            add_loss(totals, value, weight)
            part = "data"
            del value
    except Exception as error:
        mark_user_error(error, part, train_state.loss if part == "loss" else None)
        raise


def finish(train_state: TrainState, totals: StepTotals) -> StepResult:
    """Turn the accumulated gradients into one optimizer step, and free them.

    The order is: measure and check the norms, normalize and clip in one multiplication, unscale, step, update
    the loss scale, update the weight average, free the gradients. The check comes before the clip, because a
    non-finite norm would clip nothing. Unscaling is part of the step, because some optimizers do it
    themselves; a loss scale is a power of two, so this changes no result.
    Schedules, counters and records follow in `autobatch.training`.

    Without a loss scale, weights move only if the loss and all gradients are finite. If none moved, the
    buffers can still be restored to the start of the batch.

    Raises:
        InputError: the loss does not depend on the trained parameters, the counts of its `Loss` do not sum to
            a finite number of at least 0, or a term counted other items while it trained than before.
    """
    train_state.meter.mark("optimizer")
    scaler, gradients = train_state.scaler, train_state.gradients.by_optimizer()
    has_gradient = [bool(own) for own in gradients]
    norms = [norm_of(own) if own and totals.norms is None else None for own in gradients]
    own_norms = read_totals(totals, norms)
    values = own_norms if totals.norms is None else totals.norms
    divisor, items = divisor_and_items(totals)
    if items and not any(has_gradient):
        raise InputError(
            "the loss gives no gradient to any parameter that the optimizer trains: build the optimizer from "
            "the parameters of this model, of which some are not frozen, and compute the loss from its "
            "output, without detach() and torch.no_grad()"
        )
    # Overflow after overflow halves a loss scale down to 0, and no gradient has a norm then.
    scale = (scaler.get_scale() if any(has_gradient) else 1.0) or math.nan
    factor = divisor / items if items else math.nan
    loss = factor * sum(float(term.loss) for term in totals.terms.values())
    # A loss scale skips the optimizers that overflowed; without one, all step or none.
    finite = tuple(math.isfinite(value / scale) for value in values)
    may_step = items > 0 and (scaler.is_enabled() or (all(finite) and math.isfinite(loss)))
    steps = finite if may_step else (False,) * len(finite)
    if any(steps):
        # An overflowed gradient is not stepped with, so it does not clip the others.
        norm = math.hypot(*(v for v, step in zip(values, steps, strict=True) if step)) * factor / scale
        # The clip of torch/nn/utils/clip_grad.py.
        most = train_state.max_grad_norm
        coefficient = factor if most is None else factor * min(1.0, most / (norm + 1e-6))
        if coefficient != 1.0:
            torch._foreach_mul_([g for own in gradients for g in own], coefficient)
    # Not held any longer: rounding 16-bit gradients frees their sums one by one.
    del gradients, norms
    if any(steps) or (may_step and not math.isnan(scale)):
        train_state.buffers.commit()
        _take_steps(train_state, has_gradient)
        if any(steps) and train_state.average is not None:
            train_state.average.update()
    train_state.gradients.clear()
    return StepResult(
        loss=loss,
        count=items,
        applied=any(steps),
        grad_norm=math.hypot(*values) * factor / scale,
        stepped=steps,
        terms={name: float(term.loss) for name, term in totals.terms.items() if name and term.divisor},
    )


def _take_steps(train_state: TrainState, has_gradient: list[bool]) -> None:
    """Run every optimizer and the update of the loss scale; after a failure here nothing can be repeated.

    The loss scale skips optimizers whose gradients overflowed, and refuses one without any gradient.
    """
    train_state.gradients.round_sums()
    # Hooks of the user's, which follow a step, change weights.
    with torch.no_grad(), user_code("optimizer"):
        for optimizer, has in zip(train_state.optimizers, has_gradient, strict=True):
            if has:
                train_state.scaler.step(optimizer)
            else:
                optimizer.step()
        if any(has_gradient):
            train_state.scaler.update()
