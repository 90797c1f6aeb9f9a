"""One micro-batch and one optimizer step.

The probe, the trials, the traced footprint and the training loop all run this code, so what is predicted and
probed is what trains.

A window is the samples of one optimizer step. Its gradient is Σ totals ÷ Σ counts over the whole window, not
a mean of means. A loss that is a mean over n samples contributes ``mean · n ÷ samples`` at once. A `Loss`
contributes ``total ÷ E``, with E a power of two near the count that is expected (so that dividing by it
rounds nothing), and the window's gradient is multiplied once by E ÷ N when N, the sum of the counts, is
known.
There is one host synchronisation a window, after the last backward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autobatch.errors import InputError
from autobatch.records import Precision
from autobatch.workload import Batch, Loss, Workload, blame

Optimizers = tuple[torch.optim.Optimizer, ...]
Mark = Callable[[str], None]
"""Told what comes next: ``setup``, ``forward``, ``backward`` or ``optimizer``."""

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Trainee:
    """A model with all that an optimizer step of it needs."""

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor | Loss]
    optimizers: Optimizers
    parameters: list[nn.Parameter]
    """What the optimizers train, each once."""
    device: torch.device
    precision: Precision
    scaler: torch.amp.GradScaler | None
    """Only for fp16: gradients in bf16 and fp32 need no loss scale."""
    max_grad_norm: float | None
    items_per_sample: float | None = None
    """The first count that a `Loss` gave, a sample; ``None`` until then. Fixed for the whole run."""


@dataclass(kw_only=True)
class Tally:
    """What the micro-batches of one window left behind."""

    samples: int
    total: Tensor | float = 0.0
    """Σ of what was backpropagated, before any loss scale."""
    count: Tensor | float | None = None
    """Σ of the counts of `Loss`; ``None`` where the loss is a mean over samples."""
    expected: float = 1.0
    """E: what each total was divided by."""
    micro_batches: list[int] = field(default_factory=list)


class WindowResult(NamedTuple):
    """One optimizer step, or a window that took none."""

    loss: float
    """Mean over everything that the window counted; NaN where it counted nothing."""
    count: float
    """Items counted (samples where the loss is a mean over samples)."""
    applied: bool
    """False where the scaler found an overflow, or the window counted nothing."""
    grad_norm: float | None
    """Norm of the window's gradient before clipping; ``None`` where it was not asked for."""


def assemble(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    *,
    precision: Precision,
    learning_rate: float,
    max_grad_norm: float | None = None,
    knobs: Mapping[str, object] | None = None,
) -> Trainee:
    """Put a model with its optimizer and its loss scale together; the model is on ``device`` already.

    Of the tuner's ``knobs``, those that are settings of the optimizer are set here.

    Raises:
        InputError: the workload's optimizer is none, or trains nothing.
    """
    try:
        made = workload.optimizer(model.parameters(), learning_rate)
    except Exception as error:
        blame(error, "optimizer")
        raise
    optimizers = tuple(made) if isinstance(made, list | tuple) else (made,)
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError(
                f"Workload(optimizer=…) returned a {type(one).__name__}, not a torch.optim.Optimizer"
            )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if knobs and knobs.get("fused") is not None:
        for group in groups:
            group["fused"], group["foreach"] = bool(knobs["fused"]), None
    parameters = list({id(p): p for group in groups for p in group["params"] if p.requires_grad}.values())
    if not parameters:
        raise InputError("the workload's optimizer was given no parameter that requires a gradient")
    return Trainee(
        model=model,
        loss=workload.loss,
        optimizers=optimizers,
        parameters=parameters,
        device=device,
        precision=precision,
        scaler=torch.amp.GradScaler(device.type) if precision == "fp16" else None,
        max_grad_norm=max_grad_norm,
    )


def precision_context(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Autocast for the forward of a micro-batch; nothing for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def accumulate(trainee: Trainee, batches: Iterable[tuple[Batch, int]], samples: int, mark: Mark) -> Tally:
    """Run the micro-batches of a window forward and backward; gradients add up in ``.grad``.

    Args:
        trainee: the model and its optimizer.
        batches: each micro-batch, on the device, with its number of samples.
        samples: samples of the whole window, over all ranks.
        mark: told what comes next.
    """
    tally = Tally(samples=samples)
    part = "data"
    try:
        for batch, size in batches:
            part = "loss"
            mark("forward")
            with precision_context(trainee.device, trainee.precision):
                share = _share(trainee, tally, trainee.loss(trainee.model, batch), size)
            part = "the backward pass of its loss"
            mark("backward")
            (share if trainee.scaler is None else trainee.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
            tally.total = tally.total + share.detach()
            tally.micro_batches.append(size)
            part = "data"
            # The next batch is fetched while this frame lives: let go of this one first.
            del batch, share
    except Exception as error:
        blame(error, part)
        raise
    return tally


def finish(trainee: Trainee, tally: Tally, *, measure_norm: bool = False, mark: Mark) -> WindowResult:
    """Turn accumulated gradients into one optimizer step; the gradients are freed.

    The order is: unscale, normalise, clip, check, step, update of the loss scale.

    Args:
        trainee: the model and its optimizer, with the window's gradients.
        tally: what `accumulate` returned.
        measure_norm: read the gradient's norm even where nothing is clipped.
        mark: told what comes next.

    Returns:
        The window's loss; where the loss is not finite and there is no loss scale, no step was taken and
        ``applied`` is False.
    """
    mark("optimizer")
    gradients = [p.grad for p in trainee.parameters if p.grad is not None]
    if trainee.scaler is not None and gradients:
        for optimizer in trainee.optimizers:
            trainee.scaler.unscale_(optimizer)
    norm = None
    if gradients and (measure_norm or trainee.max_grad_norm is not None):
        norm = torch.nn.utils.get_total_norm(gradients)
    total, count, norm_value = _read(tally.total, tally.count, norm)
    items = float(tally.samples) if count is None else count
    factor = 1.0 if count is None else (tally.expected / count if count else math.nan)
    loss = total * factor
    grad_norm = None if norm_value is None else norm_value * factor
    applied = bool(gradients) and items > 0 and (trainee.scaler is not None or math.isfinite(loss))
    if applied:
        scale = factor * _clip_coefficient(grad_norm, trainee.max_grad_norm)
        if scale != 1.0 and math.isfinite(scale):
            torch._foreach_mul_(gradients, scale)
        applied = _take_step(trainee)
    del gradients
    discard_gradients(trainee)
    return WindowResult(loss=loss, count=items, applied=applied, grad_norm=grad_norm)


def run_window(
    trainee: Trainee,
    batches: Iterable[tuple[Batch, int]],
    samples: int,
    *,
    measure_norm: bool = False,
    mark: Mark = lambda _: None,
) -> WindowResult:
    """One optimizer step over all micro-batches of a window; see `accumulate` and `finish`."""
    return finish(trainee, accumulate(trainee, batches, samples, mark), measure_norm=measure_norm, mark=mark)


def discard_gradients(trainee: Trainee) -> None:
    """Free all gradients."""
    for parameter in trainee.parameters:
        parameter.grad = None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors of a batch: nested tuples, lists and mappings, and anything that has ``.to``."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor) or callable(getattr(batch, "to", None)):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        for key, value in batch.items():
            moved[key] = to_device(value, device)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a nested batch, or of an object that keeps them as attributes."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        for value in vars(batch).values():
            if isinstance(value, Tensor | Mapping | list | tuple):
                yield from tensors_of(value)


def _share(trainee: Trainee, tally: Tally, loss: Tensor | Loss, size: int) -> Tensor:
    """What a micro-batch adds to the window's loss, as a 0-d tensor to go backward from."""
    if isinstance(loss, Loss):
        total, count = loss
        if trainee.items_per_sample is None:
            # The only synchronisation inside a window, once in a run.
            trainee.items_per_sample = max(float(count) / size, 2.0**-20)
        if tally.count is None:
            tally.count = 0.0
            tally.expected = 2.0 ** round(math.log2(trainee.items_per_sample * tally.samples))
        tally.count = tally.count + (count.detach().double() if isinstance(count, Tensor) else count)
        share = total / tally.expected
    elif isinstance(loss, Tensor) and loss.dim() == 0:
        share = loss * (size / tally.samples)
    else:
        raise InputError(f"the workload's loss must return a 0-d tensor or a Loss, found {_shape(loss)}")
    if share.dim() != 0:
        raise InputError(f"the total of a Loss must be 0-d, found {_shape(share)}")
    return share


def _read(
    total: Tensor | float, count: Tensor | float | None, norm: Tensor | None
) -> tuple[float, float | None, float | None]:
    """Bring the window's figures to the host in one transfer."""
    if not isinstance(total, Tensor):
        return float(total), None if count is None else float(count), None
    device = total.device
    figures = [total.double()]
    if isinstance(count, Tensor):
        figures.append(count.to(device))
    if norm is not None:
        figures.append(norm.detach().double().to(device))
    values = torch.stack(figures).tolist() if len(figures) > 1 else [total.item()]
    norm_value = values.pop() if norm is not None else None
    if isinstance(count, Tensor):
        return values[0], values[1], norm_value
    return values[0], None if count is None else float(count), norm_value


def _clip_coefficient(norm: float | None, max_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to ``max_norm`` (torch/nn/utils/clip_grad.py)."""
    if norm is None or max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def _take_step(trainee: Trainee) -> bool:
    try:
        if trainee.scaler is None:
            for optimizer in trainee.optimizers:
                optimizer.step()
            return True
        before = trainee.scaler.get_scale()
        for optimizer in trainee.optimizers:
            trainee.scaler.step(optimizer)
        trainee.scaler.update()
    except Exception as error:
        blame(error, "optimizer")
        raise
    # There is no public word on whether a step was skipped: the scale only falls when one was.
    return trainee.scaler.get_scale() >= before


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
