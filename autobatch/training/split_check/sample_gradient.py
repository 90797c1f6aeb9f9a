"""Gradient of the loss over chosen samples, for the check that the loss can be split."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autobatch.core.records.base import Precision
from autobatch.device.base import Meter
from autobatch.setup.attempt import TrainSetup
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.train_state import precision_context
from autobatch.step.whole_batch import Passes, backward_whole_batch
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.nested import map_tensors, tensors_of, to_device

ELEMENTS = 1024
"""Elements read from each parameter's gradient, evenly spaced: enough to compare, for any size of model."""
FP16_SCALE = 1024.0
"""Loss scale of fp16, in which gradients below 6e-8 would be 0."""


@dataclass(frozen=True, slots=True)
class SampleGradient:
    """Gradient of the mean loss over some samples."""

    elements: Tensor
    """Elements of the gradient, in float64 on the host."""
    count: float | None
    """Count of the `Loss`; ``None`` if the loss is a mean over samples."""
    samples: int

    @property
    def weight(self) -> float:
        """Weight of these samples in a batch: their count, else their number."""
        return float(self.samples) if self.count is None else self.count


class GradientRunner:
    """Forward and backward passes over chosen samples.

    Args:
        setup: the workload and the device.
        model: the model, on the device.
        meter: counts the batches.
        dtype: floating-point type to convert batches to; ``None`` to keep theirs.
        precision: precision of the forward pass.
    """

    def __init__(
        self,
        setup: TrainSetup,
        model: nn.Module,
        meter: Meter,
        dtype: torch.dtype | None,
        precision: Precision = "fp32",
    ) -> None:
        self._setup = setup
        self._model = model
        self._meter = meter
        self._dtype = dtype
        self._precision = precision
        self._scale = FP16_SCALE if precision == "fp16" else 1.0

    def run(self, batch: Collated, samples: int) -> SampleGradient:
        """Run a collated batch of this many samples forward and backward in one micro-batch."""
        with self._autocast():
            loss = self._setup.workload.loss(self._model, self.placed(batch))
        total, count = loss if isinstance(loss, Loss) else (loss, None)
        items = None if count is None else float(count.detach() if isinstance(count, Tensor) else count)
        if total.requires_grad:
            # In fp16 the gradient of a sum over many items would overflow.
            mean = (total.float() if total.dtype in LOW_PRECISION else total) / (items or 1.0)
            (mean * self._scale).backward()  # type: ignore[no-untyped-call]
        return SampleGradient(self._take_gradient(), items, samples)

    def run_cached(self, micro_batches: Iterable[tuple[Collated, int]], samples: int) -> SampleGradient:
        """Run micro-batches, as a `WholeBatchLoss` trains; they are placed, and can be iterated twice."""
        loss = self._setup.workload.loss
        assert isinstance(loss, WholeBatchLoss)
        passes = Passes(
            loss=loss,
            model=self._model,
            autocast=self._autocast,
            scale=lambda value: value * self._scale,
            mark=lambda _: None,
        )
        backward_whole_batch(passes, micro_batches, samples, restore_buffers=lambda: None)
        return SampleGradient(self._take_gradient(), None, samples)

    def placed(self, batch: Collated) -> Collated:
        """Return a copy of a collated batch on the device, in the runner's floating-point type.

        A loss may change its batch in place.
        """
        dtype = self._dtype
        with self._meter.uncounted():
            own = copy.deepcopy(batch)
            if dtype is not None:
                own = map_tensors(own, lambda one: one.to(dtype) if one.is_floating_point() else one)
            own = to_device(own, self._setup.device.torch_device)
        self._meter.count(tensors_of(own))
        return own

    def _autocast(self) -> AbstractContextManager[object]:
        return precision_context(self._setup.device.torch_device, self._precision)

    def _take_gradient(self) -> Tensor:
        """Return elements of the gradient that the backward passes left, and clear it."""
        parts = [_elements(p) for p in self._model.parameters() if p.requires_grad]
        self._model.zero_grad(set_to_none=True)
        # Moved and converted at once: a model may have thousands of parameters.
        return torch.cat(parts).to("cpu", torch.float64) / self._scale


def _elements(parameter: nn.Parameter) -> Tensor:
    stride = max(1, parameter.numel() // ELEMENTS)
    if parameter.grad is None:
        return parameter.new_zeros(len(range(0, parameter.numel(), stride)))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    flat = gradient.detach().flatten()
    return flat if stride == 1 else flat[::stride]
