"""Does the loss of a batch follow from the losses of its parts? Asked before training, on a few samples.

The gradient g of a whole batch is held against the gradients of its parts, each by itself. Where the
window's formula gives g, accumulation is exact. Where some other weights of the parts do, the loss is a mean
over something else than samples; where none do, samples see each other (contrastive losses, normalisation
over the batch). Of a `WholeBatchLoss` the two passes over the parts must give g. The model runs in eval mode,
so that dropout and BatchNorm stand still.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify
from autobatch.planning import micro_batches, split_evenly
from autobatch.probing.attempt import TrainSetup
from autobatch.step.restore import temporary_weights
from autobatch.step.whole_batch import backward_whole_batch
from autobatch.training.batchnorm import advice, batch_norms, smallest_micro_batch
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import feed, map_tensors, tensors_of, to_device
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state

SAMPLES = 6


PARTS = 3


ELEMENTS = 1024
"""Read of each parameter's gradient, spread over it: enough to tell, whatever the size of the model."""


DOUBLE_SHARE = 0.1
"""Models whose float64 copy and gradient take less of the budget than this are checked in float64."""


TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-2}
"""Relative; models that compute in float32 whatever they are given, and TF32, stay below."""


@dataclass(frozen=True, slots=True)
class _Part:
    gradient: Tensor
    """A sample of the gradient's elements, in float64 on the host."""
    count: float | None
    """Of a `Loss`; ``None`` where the loss is a mean over samples."""
    samples: int


def check_loss_splits(
    setup: TrainSetup,
    *,
    micro_batch: int,
    sampler: GlobalBatchSampler,
    check: Literal["error", "note", "off"] = "error",
) -> list[str]:
    """Check that splitting a window changes nothing but the order of sums.

    Args:
        setup: the workload and its model, which is only lent.
        micro_batch: the largest micro-batch of the run, in samples.
        sampler: its windows.
        check: what a loss that cannot be split is, where windows are split: an error, or a note; ``off``: it
            is not looked at, only at BatchNorm.

    Returns:
        Notes, a line each.

    Raises:
        InputError: windows are split, and the loss of the whole is not made of the losses of the parts; or a
            BatchNorm gets a single value.
    """
    notes = advice(setup.model, sampler, micro_batch)
    is_split = len(micro_batches(sampler.target_batch, micro_batch)) > 1
    with preserved_random_state(), setup.device.training() as meter:
        if batch_norms(setup.model) and smallest_micro_batch(sampler, micro_batch) == 1:
            _check_single_sample(setup, meter, sampler)
        found = None if check == "off" else _first_that_runs(setup, meter, micro_batch)
    setup.device.release()
    if found is None:
        return notes
    if not is_split:
        found += "; now each window is one micro-batch, and stays exact while memory lasts"
    elif check == "error":
        raise InputError(f"{found}; or train all the same, with --split-check note")
    return [*notes, found]


def _first_that_runs(setup: TrainSetup, meter: Meter, micro_batch: int) -> str | None:
    """The fault that was found; ``None`` where there is none, or no way of looking for it."""
    size = min(SAMPLES, len(setup.workload.train_data), max(2, micro_batch))  # type: ignore[arg-type]
    if size < 2:
        return None
    tries: list[tuple[torch.dtype, bool]] = [(torch.float32, False), (torch.float32, True)]
    elements = sum(tensor.numel() for tensor in setup.model.parameters())
    if elements * 16 < setup.device.budget_bytes * DOUBLE_SHARE:
        tries.insert(0, (torch.float64, False))
    for dtype, training in tries:
        fault = _try(setup, meter, size, dtype, training=training)
        if fault != "":
            return fault
    return None


def _try(setup: TrainSetup, meter: Meter, size: int, dtype: torch.dtype, *, training: bool) -> str | None:
    """One way of looking; the empty text where it cannot be gone (a part of the model needs another type)."""
    try:
        with temporary_weights(setup.model, setup.device.torch_device) as model:
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
            meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
            model.train(training)
            if training:
                for module in model.modules():
                    if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                        module.eval()
            return _fault(setup, _Runner(setup, model, meter, dtype), size, TOLERANCES[dtype])
    except InputError:
        raise
    except Exception as error:
        # What a model that trains cannot do here (other types, eval mode, no room) is no fault of its loss.
        return None if classify(error) is not Verdict.NONE else ""


def _fault(setup: TrainSetup, run: _Runner, size: int, tolerance: float) -> str | None:
    count = len(setup.workload.train_data)  # type: ignore[arg-type]
    ids = [index * (count - 1) // (size - 1) for index in range(size)]
    torch.manual_seed(1)
    whole = run(ids)
    torch.manual_seed(2)
    again = run(ids)
    length = float(whole.gradient.norm())
    if not length > 0.0 or float((again.gradient - whole.gradient).norm()) > tolerance * length:
        # Nothing to compare, or a loss that draws random numbers even so.
        return None
    if isinstance(setup.workload.loss, WholeBatchLoss):
        cached = run.in_two_passes(ids, split_evenly(size, min(PARTS, size)))
        error = float((cached.gradient - whole.gradient).norm()) / length
        return None if error <= tolerance else _cause_of_rows(size, error)
    parts, first = [], 0
    for part in split_evenly(size, min(PARTS, size)):
        parts.append(run(ids[first : first + part]))
        first += part
    total = sum(_weight(part) for part in parts)
    if not total:
        return None
    columns = torch.stack([part.gradient for part in parts], dim=1)
    formula = columns @ torch.tensor([_weight(part) / total for part in parts], dtype=torch.float64)
    if whole.count is not None and abs(whole.count - total) > tolerance * abs(total):
        return (
            f"the count of the workload's Loss is {whole.count:g} for {size} samples at once and {total:g} "
            "in parts: it must be what total is a sum over"
        )
    error = float((formula - whole.gradient).norm()) / length
    if error <= tolerance:
        return None
    weights = torch.linalg.lstsq(columns, whole.gradient[:, None]).solution[:, 0]
    left = float((columns @ weights - whole.gradient).norm()) / length
    return _cause(whole, weights.tolist(), error=error, left=left, tolerance=tolerance)


def _cause(whole: _Part, weights: list[float], *, error: float, left: float, tolerance: float) -> str:
    """Name the likely reason why the parts do not add up."""
    size = whole.samples
    start = f"the gradient of {size} samples at once and in parts differs by {error:.1%}: "
    if left > tolerance:
        return start + (
            "samples of a batch see each other in the loss (a contrastive loss, statistics of the batch, a "
            "penalty on the whole batch), so the batch cannot be split as it is: hand over "
            "WholeBatchLoss(represent=…, loss=…), which is accumulated exactly, use a target batch that fits "
            "in one micro-batch, or a loss that treats samples one by one"
        )
    if whole.count is not None:
        return start + "the total of the workload's Loss must be a sum over the items that count counts"
    if sum(weights) > 1.5:
        return start + (
            "the workload's loss is a sum over the batch: return the mean over its samples, or "
            "Loss(total, count) with what it is a sum over"
        )
    return start + (
        "the workload's loss is a mean over something else than samples (tokens that count, class weights, "
        "pixels): return Loss(total, count) with the sum and what it is a sum over"
    )


def _cause_of_rows(size: int, error: float) -> str:
    return (
        f"the gradient of {size} samples at once and by their cached rows differs by {error:.1%}: "
        "WholeBatchLoss(represent=…) must make each row of its own sample alone; what sees several samples "
        "belongs in WholeBatchLoss(loss=…)"
    )


def _check_single_sample(setup: TrainSetup, meter: Meter, sampler: GlobalBatchSampler) -> None:
    """A BatchNorm of a single value raises: better now than in the last window of the run."""
    try:
        with temporary_weights(setup.model, setup.device.torch_device) as model:
            model.train()
            _Runner(setup, model, meter, None)([0])
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            return
        last = sampler.size(sampler.total - 1)
        raise InputError(
            f"a micro-batch of 1 comes up in this run (the last window has {last} samples), and BatchNorm "
            "needs 2: choose a target batch that leaves no single sample, --last-window drop, or --steps "
            "instead of --epochs"
        ) from None
    except Exception:  # what else fails here fails in training too, and is told there
        return


class _Runner:
    """Loss and gradient of some samples, by themselves."""

    def __init__(self, setup: TrainSetup, model: nn.Module, meter: Meter, dtype: torch.dtype | None) -> None:
        self._bench = setup
        self._model = model
        self._meter = meter
        self._dtype = dtype

    def __call__(self, ids: Sequence[int]) -> _Part:
        """Run them forward and backward."""
        with self._meter.uncounted():
            batch = to_device(self._joined(ids), self._bench.device.torch_device)
        self._meter.count(tensors_of(batch))
        loss = self._bench.workload.loss(self._model, batch)
        total, count = loss if isinstance(loss, Loss) else (loss, None)
        total.backward()  # type: ignore[no-untyped-call]
        found = self._gradient()
        if count is None:
            return _Part(found, None, len(ids))
        items = float(count.detach() if isinstance(count, Tensor) else count)
        return _Part(found / items if items else found, items, len(ids))

    def in_two_passes(self, ids: Sequence[int], sizes: Sequence[int]) -> _Part:
        """Run them as the micro-batches of a window with a loss that sees all of it."""
        loss = self._bench.workload.loss
        assert isinstance(loss, WholeBatchLoss)
        ends = accumulate(sizes)
        fetched = ((self._joined(ids[end - size : end]), size) for size, end in zip(sizes, ends, strict=True))
        backward_whole_batch(
            loss,
            self._model,
            feed(fetched, self._bench.device.torch_device, self._meter, twice=True),
            len(ids),
            autocast=nullcontext,
            scale=lambda value: value,
            restore_buffers=lambda: None,
            mark=lambda _: None,
        )
        return _Part(self._gradient(), None, len(ids))

    def _joined(self, ids: Sequence[int]) -> Collated:
        """The samples as a batch of the type that is checked in, on the host."""
        batch, dtype = load_micro_batch(self._bench.workload, ids), self._dtype
        if dtype is None:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def _gradient(self) -> Tensor:
        """What the backward passes left behind, which is let go of."""
        found = torch.cat([_elements(p) for p in self._model.parameters() if p.requires_grad])
        self._model.zero_grad(set_to_none=True)
        return found


def _elements(parameter: nn.Parameter) -> Tensor:
    stride = max(1, parameter.numel() // ELEMENTS)
    if parameter.grad is None:
        return torch.zeros(len(range(0, parameter.numel(), stride)), dtype=torch.float64)
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().flatten()[::stride].to("cpu", torch.float64)


def _weight(part: _Part) -> float:
    return float(part.samples) if part.count is None else part.count
