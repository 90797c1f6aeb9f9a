"""One micro-batch and one optimizer step.

The probe, the trials, the traced footprint and the training loop all run this code, so what is predicted and
probed is what trains.

A window is the samples of one optimizer step. Its gradient is Σ totals ÷ Σ counts over the whole window, not
a mean of means. Every micro-batch contributes ``total ÷ D``, with a divisor D that is the same for the
whole window; when N, the sum of the counts, is known, the window's gradient is multiplied once by D ÷ N.
Where the loss is a mean over samples, N is known beforehand and D = N; for a `Loss` (and in 16 bits) D is a
power of two near N, so that dividing by it rounds nothing. The loss over a whole window, of a
`WholeBatchLoss`, stands as it is; see `autobatch.step.whole_batch`.

There is one host synchronisation a window, after the last backward; a loss scale brings its own, in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autobatch.core.errors import AutobatchError, InputError
from autobatch.step.gradients import LOW_PRECISION, norm_of
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import backward_whole_batch
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.nested import form_of, tensors_of, to_device
from autobatch.workload.user_code import mark_user_error, user_code

__all__ = [
    "Mark",
    "StepAccumulator",
    "StepResult",
    "TrainState",
    "accumulate",
    "backward_scaled",
    "finish",
    "precision_context",
    "scaled_loss",
    "tensors_of",
    "to_device",
    "train_step",
]


Mark = Callable[[str], None]
"""Told what comes next: ``setup``, ``forward``, ``loss`` (of a window), ``backward`` or ``optimizer``."""


@dataclass(kw_only=True)
class StepAccumulator:
    """What the micro-batches of one window left behind."""

    samples: int
    total: Tensor | float = 0.0
    """Σ of what was backpropagated, before any loss scale."""
    count: Tensor | float | None = None
    """Σ of the counts of `Loss`; ``None`` where the loss is a mean over samples."""
    divisor: float = 1.0
    """D: what each total was divided by."""
    micro_batches: list[int] = field(default_factory=list)
    first_norm: Tensor | None = None
    """Norm of the gradient after the first micro-batch, as it stands; ``None`` where it was not asked for."""
    first_count: Tensor | float = 0.0
    """What the first micro-batch counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, or a window that took none."""

    loss: float
    """Mean over everything that the window counted; NaN where it counted nothing."""
    count: float
    """Items counted (samples where the loss is a mean over samples)."""
    applied: bool
    """False where no optimizer stepped: an overflow, a figure that is not finite, or nothing counted."""
    grad_norm: float
    """Norm of the window's gradient before clipping."""
    stepped: tuple[bool, ...]
    """For each optimizer, whether it took its step."""
    first_norm: float | None = None
    """Norm of the mean gradient over the first micro-batch alone, where it was asked for."""
    first_count: float = 0.0
    """Items that the first micro-batch counted."""


def accumulate(
    train_state: TrainState,
    batches: Iterable[tuple[Collated, int]],
    samples: int,
    mark: Mark,
    *,
    measure_first: bool = False,
) -> StepAccumulator:
    """Run the micro-batches of a window forward and backward; their gradients add up.

    Args:
        train_state: the model and its optimizer.
        batches: each micro-batch, on the device, with its number of samples; for a `WholeBatchLoss` they
            must be such as can be gone through twice (`autobatch.workload.nested.Twice`).
        samples: samples of the whole window, over all ranks.
        mark: told what comes next.
        measure_first: also take the norm of the gradient after the first micro-batch, where that is the mean
            over its own samples.
    """
    accumulator = StepAccumulator(samples=samples)
    train_state.buffers.keep()
    part = "data"
    try:
        with train_state.gradients.accumulating():
            if isinstance(train_state.loss, WholeBatchLoss):
                _accumulate_whole(train_state, train_state.loss, batches, accumulator, mark)
                return accumulator
            for batch, size in batches:
                part = "loss"
                mark("forward")
                with precision_context(train_state.device, train_state.precision):
                    share = scaled_loss(
                        train_state, accumulator, train_state.loss(train_state.model, batch), size
                    )
                part = "the backward pass of its loss"
                mark("backward")
                backward_scaled(train_state, accumulator, share, size)
                if measure_first and accumulator.first_norm is None:
                    _measure_first(train_state, accumulator)
                part = "data"
                # The next batch is fetched while this frame lives: let go of this one first.
                del batch, share
    except AutobatchError:
        raise
    except Exception as error:
        mark_user_error(error, part)
        raise
    return accumulator


def _accumulate_whole(
    train_state: TrainState,
    loss: WholeBatchLoss,
    batches: Iterable[tuple[Collated, int]],
    accumulator: StepAccumulator,
    mark: Mark,
) -> None:
    scaler = train_state.scaler
    value = backward_whole_batch(
        loss,
        train_state.model,
        batches,
        accumulator.samples,
        context=lambda: precision_context(train_state.device, train_state.precision),
        scaled=_at_least_32_bits if scaler is None else lambda one: scaler.scale(_at_least_32_bits(one)),
        rewind=train_state.buffers.rewind,
        mark=mark,
    )
    accumulator.total = _at_least_32_bits(value)
    accumulator.divisor = float(accumulator.samples)


def backward_scaled(train_state: TrainState, accumulator: StepAccumulator, share: Tensor, size: int) -> None:
    """Go backward from what `scaled_loss` returned; inside `Gradients.accumulating`."""
    # A constant is what a loss may return where nothing counts.
    if share.requires_grad:
        (share if train_state.scaler is None else train_state.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
    accumulator.total = accumulator.total + share.detach()
    accumulator.micro_batches.append(size)


def _measure_first(train_state: TrainState, accumulator: StepAccumulator) -> None:
    """The gradient is the first micro-batch's own until the second adds to it; nothing waits here."""
    gradients = [gradient for own in train_state.gradients.by_optimizer() for gradient in own]
    if gradients:
        accumulator.first_norm = norm_of(gradients)
        accumulator.first_count = (
            float(accumulator.micro_batches[0]) if accumulator.count is None else accumulator.count
        )


def finish(train_state: TrainState, accumulator: StepAccumulator, *, mark: Mark) -> StepResult:
    """Turn the gradients of a window into one optimizer step, and free them.

    The order is: normalise, measure, check, clip, unscale, step, update of the loss scale, average of the
    weights, and the gradients are freed here, at the end, so that none is held while nothing needs it. The
    check comes before the clip, for a norm that is not finite clips nothing. Unscaling stands with the step,
    where optimizers that unscale by themselves do it; a loss scale is a power of two, so the place makes no
    difference. Schedules, counters and what a run writes follow in `autobatch.training`.

    Args:
        train_state: the model and its optimizer, with the window's gradients.
        accumulator: what `accumulate` returned.
        mark: told what comes next.

    Returns:
        The window's loss; without a loss scale, nothing moved unless the loss and all gradients are finite.
        Where that is so, the buffers can still be put back to where the window found them.

    Raises:
        InputError: the loss does not depend on what is trained.
    """
    mark("optimizer")
    gradients = train_state.gradients.by_optimizer()
    norms = [norm_of(own) if own else None for own in gradients]
    (total, count, first_norm, first_count), values = _read(accumulator, norms)
    scale = 1.0 if train_state.scaler is None or not any(gradients) else train_state.scaler.get_scale()
    items = float(accumulator.samples) if accumulator.count is None else count
    if items > 0 and not any(gradients):
        raise InputError(
            "the workload's loss has no gradient: it must come out of the parameters that the optimizer "
            "trains, with nothing detached and no torch.no_grad() on the way"
        )
    factor = accumulator.divisor / items if items else math.nan
    finite = tuple(math.isfinite(value) for value in values)
    loss = total * factor
    steps = finite
    if not items > 0 or (train_state.scaler is None and not (all(finite) and math.isfinite(loss))):
        steps = (False,) * len(finite)
    if any(steps):
        # A gradient that overflowed is not stepped with, so it does not count for those that are.
        norm = math.hypot(*(v for v, step in zip(values, steps, strict=True) if step)) * factor / scale
        coefficient = factor * _clip_coefficient(norm, train_state.max_grad_norm)
        if coefficient != 1.0:
            torch._foreach_mul_([g for own in gradients for g in own], coefficient)
    has_gradient = [bool(own) for own in gradients]
    del gradients, norms
    if items > 0 and (train_state.scaler is not None or any(steps)):
        train_state.buffers.commit()
        _take_steps(train_state, has_gradient, moved=any(steps))
    train_state.gradients.clear()
    return StepResult(
        loss=loss,
        count=items,
        applied=any(steps),
        grad_norm=math.hypot(*values) * factor / scale,
        stepped=steps,
        first_norm=first_norm * accumulator.divisor / first_count / scale if first_count > 0 else None,
        first_count=first_count,
    )


def train_step(
    train_state: TrainState,
    batches: Iterable[tuple[Collated, int]],
    samples: int,
    *,
    mark: Mark = lambda _: None,
) -> StepResult:
    """One optimizer step over all micro-batches of a window; see `accumulate` and `finish`."""
    return finish(train_state, accumulate(train_state, batches, samples, mark), mark=mark)


def scaled_loss(
    train_state: TrainState, accumulator: StepAccumulator, loss: Tensor | Loss, size: int
) -> Tensor:
    """What a micro-batch of ``size`` samples adds to the window's loss, as a 0-d tensor to go backward from.

    Raises:
        InputError: it is no loss, or of another kind than that of the micro-batch before.
    """
    if accumulator.micro_batches and isinstance(loss, Loss) != (accumulator.count is not None):
        raise InputError("the workload's loss returned a Loss for one micro-batch and a tensor for another")
    if isinstance(loss, Loss):
        total, count = loss
        if not isinstance(total, Tensor) or total.dim() != 0:
            raise InputError(f"the total of a Loss must be a 0-d tensor, found {form_of(total)}")
        if isinstance(count, Tensor) and count.dim() != 0:
            raise InputError(f"the count of a Loss must be a number or a 0-d tensor, found {form_of(count)}")
        if accumulator.count is None:
            accumulator.count = 0.0
            accumulator.divisor = _power_of_two(
                _items_per_sample(train_state, count, size) * accumulator.samples
            )
        accumulator.count = accumulator.count + (
            count.detach().double() if isinstance(count, Tensor) else count
        )
        return _at_least_32_bits(total) / accumulator.divisor
    if isinstance(loss, Tensor) and loss.dim() == 0:
        if not accumulator.micro_batches:
            low = loss.dtype in LOW_PRECISION
            accumulator.divisor = _power_of_two(accumulator.samples) if low else float(accumulator.samples)
        return _at_least_32_bits(loss) * (size / accumulator.divisor)
    raise InputError(f"the workload's loss must return a 0-d tensor or a Loss, found {form_of(loss)}")


def _at_least_32_bits(value: Tensor) -> Tensor:
    return value.float() if value.dtype in LOW_PRECISION else value


def _items_per_sample(train_state: TrainState, count: float | Tensor, size: int) -> float:
    if train_state.items_per_sample is None:
        # The only synchronisation inside a window, once in a run.
        found = float(count.detach() if isinstance(count, Tensor) else count) / max(size, 1)
        if not (found > 0 and math.isfinite(found)):
            return 1.0
        train_state.items_per_sample = found
    return train_state.items_per_sample


def _power_of_two(value: float) -> float:
    return float(2.0 ** round(math.log2(value)))


def _read(
    accumulator: StepAccumulator, norms: list[Tensor | None]
) -> tuple[tuple[float, float, float, float], list[float]]:
    """Bring the window's figures to the host in one transfer; what is ``None`` becomes 0.

    Returns:
        The total, the count, the norm and the count of the first micro-batch; and the norms.
    """
    figures = [accumulator.total, accumulator.count, accumulator.first_norm, accumulator.first_count, *norms]
    away = [figure for figure in figures if isinstance(figure, Tensor) and figure.device.type != "cpu"]
    if len(away) > 1:
        values = iter(torch.stack([figure.to(away[0].device, torch.float64) for figure in away]).tolist())
        figures = [next(values) if any(figure is one for one in away) else figure for figure in figures]
    total, count, first_norm, first_count, *rest = (0.0 if f is None else float(f) for f in figures)
    return (total, count, first_norm, first_count), rest


def _clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to ``max_norm`` (torch/nn/utils/clip_grad.py)."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def _take_steps(train_state: TrainState, has_gradient: list[bool], *, moved: bool) -> None:
    """Let every optimizer step; the loss scale leaves out those whose gradients overflowed.

    The average follows where one of them ``moved`` its weights; out of memory there, nothing can be run
    again either.
    """
    train_state.stepping = True
    train_state.gradients.write_back()
    with user_code("optimizer"):
        for optimizer, has in zip(train_state.optimizers, has_gradient, strict=True):
            # A scaler refuses an optimizer that it has seen no gradient of.
            if train_state.scaler is None or not has:
                optimizer.step()
            else:
                train_state.scaler.step(optimizer)
        if train_state.scaler is not None and any(has_gradient):
            train_state.scaler.update()
    if train_state.average is not None and moved:
        train_state.average.update()
    train_state.stepping = False
