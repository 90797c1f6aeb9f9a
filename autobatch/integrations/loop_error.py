"""The error of a loop that weighs micro-batches instead of what they hold, measured on the user's data.

The library's own losses give the gradient of some samples in one micro-batch, and of the same samples in
several. A loop is exact if both agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.device.oom import first_line, is_oom
from autobatch.step.restore import temporary_weights
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import to_device
from autobatch.workload.order import permutation
from autobatch.workload.rng import preserved_random_state

MOST_PARTS = 4
ROUNDING = {torch.float16: 0.02, torch.bfloat16: 0.05}
"""Relative error below which two gradients of weights of a type count as equal."""
ROUNDING_ELSE = 1e-4
SUMMED = 0.7
"""Share of the number of micro-batches above which a gradient counts as a sum that nothing divides."""
_ONE_SAMPLE = (
    "the error of its accumulation was not measured, because only one sample fits at a time, and samples are "
    "compared at once and one by one"
)
Losses = Callable[[nn.Module, list[Collated]], Iterator[Tensor]]


def gradient_error(
    workload: Workload,
    losses: Losses,
    device: torch.device,
    size: int,
    steps: int,
    *,
    whole: Callable[[nn.Module, Collated], Tensor] | None = None,
) -> tuple[float | None, str | None]:
    """Measure how far the gradient of several micro-batches is from that of the same samples in one.

    Args:
        workload: the model, and the data.
        losses: yields the losses that the library backpropagates for the micro-batches of one step.
        device: computes the gradients.
        size: samples that fit in one micro-batch.
        steps: micro-batches of a step.
        whole: the loss of a whole batch in one micro-batch; None for that of ``losses``.

    Returns:
        The distance relative to the gradient in one micro-batch, None if it was not measured; and a remark,
        None if a step has one micro-batch.
    """
    known = min(size, len(workload.train_data))  # type: ignore[arg-type]
    if steps < 2 or known < 2:
        return None, _ONE_SAMPLE if steps > 1 else None
    parts = min(steps, MOST_PARTS, known)
    each = known // parts
    ids = permutation(len(workload.train_data), seed=0, epoch=0)[: parts * each]  # type: ignore[arg-type]
    try:
        split = [ids[n * each : (n + 1) * each] for n in range(parts)]
        found = _compare(workload, losses, device, split, whole)
    except InputError:
        raise
    except Exception as failure:
        what = "memory ran out" if is_oom(failure) else first_line(failure)
        return None, f"the error of its accumulation could not be measured: {what}"
    where = f"measured on {parts * each} of your samples in {parts} micro-batches of {each}"
    if found.error < found.rounding:
        return found.error, f"its accumulation is exact to rounding, {where}"
    differs = f"its gradient differs by {found.error:.2g} (relative) from that of the same samples at once"
    if found.scale > SUMMED * parts:
        return found.error, (
            f"{differs}, {where}, and is {found.scale:.2g} times as long, because the losses are summed over "
            "micro-batches and not divided: let the loss use num_items_in_batch, which it is given, or set "
            "trainer.loss_is_scaled_for_ga = False, so that the library divides"
        )
    if abs(found.scale - 1) > found.error / 2:
        return found.error, (
            f"{differs}, {where}, and is {found.scale:.2g} times as long: the library divides by another "
            "count than the loss does"
        )
    return found.error, (
        f"{differs}, {where}, because each micro-batch has the same weight, whatever it holds: "
        "autobatch.batches is exact"
    )


def last_step_note(
    epoch: int | None,
    target: int,
    size: int,
    steps: int,
    *,
    divides_by_plan: bool,
    averages_means: bool,
    drop_last: bool,
) -> str | None:
    """Describe the last step of an epoch; None if it is like the others, or unknown.

    Args:
        epoch: samples of an epoch; None if unknown.
        target: samples of a step.
        size: samples of a micro-batch.
        steps: micro-batches of a step.
        divides_by_plan: whether the sum over the last step is divided by ``steps``.
        averages_means: whether each micro-batch weighs the same.
        drop_last: whether a last micro-batch that is short is dropped.
    """
    rest = 0 if epoch is None else epoch % target
    rest -= rest % size if drop_last else 0
    if not rest:
        return None
    text = f"the last step of each epoch has {rest} of {target} samples"
    done = math.ceil(rest / size)
    if divides_by_plan and done < steps:
        text += (
            f" in {done} of {steps} micro-batches and is still divided by {steps}, so its gradient is "
            f"{1 - done / steps:.0%} too small"
        )
    if averages_means and rest % size and done > 1:
        text += f"; the samples of its last micro-batch weigh {size / (rest % size):.2g} times as much"
    return f"{text}: autobatch.batches carries them into the next epoch"


class _Comparison(NamedTuple):
    """The gradient of several micro-batches against that of one."""

    error: float
    """Norm of the difference ÷ norm in one micro-batch."""
    scale: float
    """Length along the gradient in one micro-batch, relative to it."""
    rounding: float
    """Error below which both are equal."""


def _compare(
    workload: Workload,
    losses: Losses,
    device: torch.device,
    parts: list[list[int]],
    whole_loss: Callable[[nn.Module, Collated], Tensor] | None,
) -> _Comparison:
    def at_once(model: nn.Module, batches: list[Collated]) -> Iterator[Tensor]:
        return losses(model, batches) if whole_loss is None else iter([whole_loss(model, batches[0])])

    model = workload.model()
    with preserved_random_state(), temporary_weights(model, device):
        model.eval()  # without dropout, and without statistics of a batch
        whole = _gradient(workload, at_once, model, device, [[one for part in parts for one in part]])
        split = _gradient(workload, losses, model, device, parts)
    pairs = list(zip(whole, split, strict=True))
    length = max(sum(float(a.square().sum()) for a, _ in pairs), 1e-60)
    return _Comparison(
        error=math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs) / length),
        scale=sum(float((a * b).sum()) for a, b in pairs) / length,
        rounding=max(ROUNDING.get(p.dtype, ROUNDING_ELSE) for p in model.parameters()),
    )


def _gradient(
    workload: Workload, losses: Losses, model: nn.Module, device: torch.device, parts: list[list[int]]
) -> list[Tensor]:
    batches = [to_device(load_micro_batch(workload, ids), device) for ids in parts]
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    for loss in losses(model, batches):
        loss.backward()  # type: ignore[no-untyped-call]
    return [torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double() for p in trained]
