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
from autobatch.step.train_state import Trainee, assemble, precision_context
from autobatch.step.whole_batch import backward_of_window
from autobatch.workload.contract import Batch, Loss, WholeBatchLoss
from autobatch.workload.nested import form_of, tensors_of, to_device
from autobatch.workload.user_code import blame, user_code

__all__ = [
    "Mark",
    "Tally",
    "Trainee",
    "WindowResult",
    "accumulate",
    "add_backward",
    "assemble",
    "finish",
    "precision_context",
    "run_window",
    "share_of",
    "tensors_of",
    "to_device",
]


Mark = Callable[[str], None]
"""Told what comes next: ``setup``, ``forward``, ``loss`` (of a window), ``backward`` or ``optimizer``."""


@dataclass(kw_only=True)
class Tally:
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
class WindowResult:
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
    trainee: Trainee,
    batches: Iterable[tuple[Batch, int]],
    samples: int,
    mark: Mark,
    *,
    measure_first: bool = False,
) -> Tally:
    """Run the micro-batches of a window forward and backward; their gradients add up.

    Args:
        trainee: the model and its optimizer.
        batches: each micro-batch, on the device, with its number of samples; for a `WholeBatchLoss` they
            must be such as can be gone through twice (`autobatch.workload.nested.Twice`).
        samples: samples of the whole window, over all ranks.
        mark: told what comes next.
        measure_first: also take the norm of the gradient after the first micro-batch, where that is the mean
            over its own samples.
    """
    tally = Tally(samples=samples)
    trainee.buffers.keep()
    part = "data"
    try:
        with trainee.gradients.adding():
            if isinstance(trainee.loss, WholeBatchLoss):
                _accumulate_whole(trainee, trainee.loss, batches, tally, mark)
                return tally
            for batch, size in batches:
                part = "loss"
                mark("forward")
                with precision_context(trainee.device, trainee.precision):
                    share = share_of(trainee, tally, trainee.loss(trainee.model, batch), size)
                part = "the backward pass of its loss"
                mark("backward")
                add_backward(trainee, tally, share, size)
                if measure_first and tally.first_norm is None:
                    _measure_first(trainee, tally)
                part = "data"
                # The next batch is fetched while this frame lives: let go of this one first.
                del batch, share
    except AutobatchError:
        raise
    except Exception as error:
        blame(error, part)
        raise
    return tally


def _accumulate_whole(
    trainee: Trainee, loss: WholeBatchLoss, batches: Iterable[tuple[Batch, int]], tally: Tally, mark: Mark
) -> None:
    scaler = trainee.scaler
    value = backward_of_window(
        loss,
        trainee.model,
        batches,
        tally.samples,
        context=lambda: precision_context(trainee.device, trainee.precision),
        scaled=_at_least_32_bits if scaler is None else lambda one: scaler.scale(_at_least_32_bits(one)),
        rewind=trainee.buffers.rewind,
        mark=mark,
    )
    tally.total = _at_least_32_bits(value)
    tally.divisor = float(tally.samples)


def add_backward(trainee: Trainee, tally: Tally, share: Tensor, size: int) -> None:
    """Go backward from what `share_of` returned; inside `Gradients.adding`."""
    # A constant is what a loss may return where nothing counts.
    if share.requires_grad:
        (share if trainee.scaler is None else trainee.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
    tally.total = tally.total + share.detach()
    tally.micro_batches.append(size)


def _measure_first(trainee: Trainee, tally: Tally) -> None:
    """The gradient is the first micro-batch's own until the second adds to it; nothing waits here."""
    gradients = [gradient for own in trainee.gradients.by_optimizer() for gradient in own]
    if gradients:
        tally.first_norm = norm_of(gradients)
        tally.first_count = float(tally.micro_batches[0]) if tally.count is None else tally.count


def finish(trainee: Trainee, tally: Tally, *, mark: Mark) -> WindowResult:
    """Turn the gradients of a window into one optimizer step, and free them.

    The order is: normalise, measure, check, clip, unscale, step, update of the loss scale, average of the
    weights, and the gradients are freed here, at the end, so that none is held while nothing needs it. The
    check comes before the clip, for a norm that is not finite clips nothing. Unscaling stands with the step,
    where optimizers that unscale by themselves do it; a loss scale is a power of two, so the place makes no
    difference. Schedules, counters and what a run writes follow in `autobatch.training`.

    Args:
        trainee: the model and its optimizer, with the window's gradients.
        tally: what `accumulate` returned.
        mark: told what comes next.

    Returns:
        The window's loss; without a loss scale, nothing moved unless the loss and all gradients are finite.
        Where that is so, the buffers can still be put back to where the window found them.

    Raises:
        InputError: the loss does not depend on what is trained.
    """
    mark("optimizer")
    gradients = trainee.gradients.by_optimizer()
    norms = [norm_of(own) if own else None for own in gradients]
    (total, count, first_norm, first_count), values = _read(tally, norms)
    scale = 1.0 if trainee.scaler is None or not any(gradients) else trainee.scaler.get_scale()
    items = float(tally.samples) if tally.count is None else count
    if items > 0 and not any(gradients):
        raise InputError(
            "the workload's loss has no gradient: it must come out of the parameters that the optimizer "
            "trains, with nothing detached and no torch.no_grad() on the way"
        )
    factor = tally.divisor / items if items else math.nan
    finite = tuple(math.isfinite(value) for value in values)
    loss = total * factor
    steps = finite
    if not items > 0 or (trainee.scaler is None and not (all(finite) and math.isfinite(loss))):
        steps = (False,) * len(finite)
    if any(steps):
        # A gradient that overflowed is not stepped with, so it does not count for those that are.
        norm = math.hypot(*(v for v, step in zip(values, steps, strict=True) if step)) * factor / scale
        coefficient = factor * _clip_coefficient(norm, trainee.max_grad_norm)
        if coefficient != 1.0:
            torch._foreach_mul_([g for own in gradients for g in own], coefficient)
    has_gradient = [bool(own) for own in gradients]
    del gradients, norms
    if items > 0 and (trainee.scaler is not None or any(steps)):
        trainee.buffers.let_go()
        _take_steps(trainee, has_gradient, moved=any(steps))
    trainee.gradients.discard()
    return WindowResult(
        loss=loss,
        count=items,
        applied=any(steps),
        grad_norm=math.hypot(*values) * factor / scale,
        stepped=steps,
        first_norm=first_norm * tally.divisor / first_count / scale if first_count > 0 else None,
        first_count=first_count,
    )


def run_window(
    trainee: Trainee, batches: Iterable[tuple[Batch, int]], samples: int, *, mark: Mark = lambda _: None
) -> WindowResult:
    """One optimizer step over all micro-batches of a window; see `accumulate` and `finish`."""
    return finish(trainee, accumulate(trainee, batches, samples, mark), mark=mark)


def share_of(trainee: Trainee, tally: Tally, loss: Tensor | Loss, size: int) -> Tensor:
    """What a micro-batch of ``size`` samples adds to the window's loss, as a 0-d tensor to go backward from.

    Raises:
        InputError: it is no loss, or of another kind than that of the micro-batch before.
    """
    if tally.micro_batches and isinstance(loss, Loss) != (tally.count is not None):
        raise InputError("the workload's loss returned a Loss for one micro-batch and a tensor for another")
    if isinstance(loss, Loss):
        total, count = loss
        if not isinstance(total, Tensor) or total.dim() != 0:
            raise InputError(f"the total of a Loss must be a 0-d tensor, found {form_of(total)}")
        if isinstance(count, Tensor) and count.dim() != 0:
            raise InputError(f"the count of a Loss must be a number or a 0-d tensor, found {form_of(count)}")
        if tally.count is None:
            tally.count = 0.0
            tally.divisor = _power_of_two(_items_per_sample(trainee, count, size) * tally.samples)
        tally.count = tally.count + (count.detach().double() if isinstance(count, Tensor) else count)
        return _at_least_32_bits(total) / tally.divisor
    if isinstance(loss, Tensor) and loss.dim() == 0:
        if not tally.micro_batches:
            low = loss.dtype in LOW_PRECISION
            tally.divisor = _power_of_two(tally.samples) if low else float(tally.samples)
        return _at_least_32_bits(loss) * (size / tally.divisor)
    raise InputError(f"the workload's loss must return a 0-d tensor or a Loss, found {form_of(loss)}")


def _at_least_32_bits(value: Tensor) -> Tensor:
    return value.float() if value.dtype in LOW_PRECISION else value


def _items_per_sample(trainee: Trainee, count: float | Tensor, size: int) -> float:
    if trainee.items_per_sample is None:
        # The only synchronisation inside a window, once in a run.
        found = float(count.detach() if isinstance(count, Tensor) else count) / max(size, 1)
        if not (found > 0 and math.isfinite(found)):
            return 1.0
        trainee.items_per_sample = found
    return trainee.items_per_sample


def _power_of_two(value: float) -> float:
    return float(2.0 ** round(math.log2(value)))


def _read(tally: Tally, norms: list[Tensor | None]) -> tuple[tuple[float, float, float, float], list[float]]:
    """Bring the window's figures to the host in one transfer; what is ``None`` becomes 0.

    Returns:
        The total, the count, the norm and the count of the first micro-batch; and the norms.
    """
    figures = [tally.total, tally.count, tally.first_norm, tally.first_count, *norms]
    away = [figure for figure in figures if isinstance(figure, Tensor) and figure.device.type != "cpu"]
    if len(away) > 1:
        values = iter(torch.stack([figure.to(away[0].device, torch.float64) for figure in away]).tolist())
        figures = [next(values) if any(figure is one for one in away) else figure for figure in figures]
    total, count, first_norm, first_count, *rest = (0.0 if f is None else float(f) for f in figures)
    return (total, count, first_norm, first_count), rest


def _clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to ``max_norm`` (torch/nn/utils/clip_grad.py)."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def _take_steps(trainee: Trainee, has_gradient: list[bool], *, moved: bool) -> None:
    """Let every optimizer step; the loss scale leaves out those whose gradients overflowed.

    The average follows where one of them ``moved`` its weights; out of memory there, nothing can be run
    again either.
    """
    trainee.stepping = True
    trainee.gradients.hand_over()
    with user_code("optimizer"):
        for optimizer, has in zip(trainee.optimizers, has_gradient, strict=True):
            # A scaler refuses an optimizer that it has seen no gradient of.
            if trainee.scaler is None or not has:
                optimizer.step()
            else:
                trainee.scaler.step(optimizer)
        if trainee.scaler is not None and any(has_gradient):
            trainee.scaler.update()
    if trainee.average is not None and moved:
        trainee.average.update()
    trainee.stepping = False
