"""A model with everything that its optimizer step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.knobs import Configuration
from autobatch.core.records import GradientDtype, Precision
from autobatch.device.base import Meter
from autobatch.step.apply_knobs import apply_forward, apply_implementation, apply_layout
from autobatch.step.ema import WeightAverage
from autobatch.step.gradients import Gradients, Optimizers, parameters_of
from autobatch.step.loss import CountsAhead
from autobatch.step.optimizers import build_optimizers
from autobatch.step.restore import BufferSnapshot
from autobatch.workload.contract import Collated, LossFunction, WholeBatchLoss, Workload
from autobatch.workload.nested import map_tensors, tensors_of, to_device

MicroBatches = Iterable[tuple[Collated, int]]
"""Micro-batches, each with its number of samples."""
AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class TrainState:
    """A model with everything that its optimizer step needs."""

    model: nn.Module
    loss: LossFunction
    optimizers: Optimizers
    parameters: list[nn.Parameter]
    """Parameters that the optimizers train, each once."""
    device: torch.device
    precision: Precision
    scaler: torch.amp.GradScaler
    """The loss scale for fp16; disabled for bf16 and fp32, whose gradients need none."""
    max_grad_norm: float | None
    """2-norm to clip the gradient of the batch to; None for no clipping."""
    gradients: Gradients
    buffers: BufferSnapshot
    """The buffers at the start of the current batch."""
    meter: Meter = field(default_factory=Meter)
    """Reads the memory of the steps, and is told of their phases."""
    counts: CountsAhead | None = None
    """Counts of the terms of the loss, which follow from the data alone; None if no term needs them."""
    average: WeightAverage | None = None
    """Average of the weights, updated by every applied step; None for no average."""
    mesh: Any = None
    """The ``DeviceMesh`` of the ranks that share the model; None if each has a whole one."""
    run: Callable[[Callable[[nn.Module, Collated], Any], Collated], Any] = field(init=False)
    """Calls a function of the model and a micro-batch; all ranks that share the model call it together."""
    forget_gathered: Callable[[], None] = lambda: None
    """Lets a rank hold its parts only of a shared model, so that changed weights are gathered anew."""

    def __post_init__(self) -> None:
        """Begin with a whole model."""
        self.run = lambda function, batch: function(self.model, batch)

    def feed(self, fetched: MicroBatches) -> MicroBatches:
        """Move the micro-batches of a batch to the device, one at a time, and hold none of them there.

        The meter counts each of them there, and nothing that is made on the host. For a `WholeBatchLoss` they
        are kept on the host, for a second iteration.
        """
        meter, on_host, twice = self.meter, self.device.type == "cpu", isinstance(self.loss, WholeBatchLoss)
        with meter.uncounted():
            if self.counts is not None:
                fetched = self.counts.ahead(fetched)
            if twice:
                fetched = list(fetched)
        if on_host and not twice and type(meter) is Meter:
            # Nothing to move and nothing to count.
            return fetched

        def fetch(source: Iterator[tuple[Collated, int]]) -> tuple[Collated, int] | None:
            with meter.uncounted():
                return next(source, None)

        def place(batch: Collated, size: int) -> tuple[Collated, int]:
            with meter.uncounted():
                # A second pass needs a copy of its own, even if the device is the host.
                copies = on_host and twice
                there = map_tensors(batch, Tensor.clone) if copies else to_device(batch, self.device)
            meter.count(tensors_of(there))
            return there, size

        # No generator, whose frame would hold each micro-batch until the next one is there.
        if twice:
            return Passes(lambda: starmap(place, fetched))
        return starmap(place, iter(partial(fetch, iter(fetched)), None))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights by their averages within the block, if there are any."""
        try:
            with nullcontext() if self.average is None else self.average.swapped_in():
                self.forget_gathered()
                yield
        finally:
            self.forget_gathered()


@dataclass(frozen=True)
class Passes:
    """Micro-batches that a function yields anew for each iteration over them."""

    begin: Callable[[], Iterator[tuple[Collated, int]]]

    def __iter__(self) -> Iterator[tuple[Collated, int]]:
        """Begin a pass."""
        return self.begin()


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of the optimizer steps of a model."""

    precision: Precision
    """Precision of the forward pass."""
    gradient_dtype: GradientDtype = "fp32"
    """Type in which the gradients of 16-bit parameters are summed."""
    max_grad_norm: float | None = None
    """2-norm to clip gradients to; None for no clipping."""
    ema: float | None = None
    """Decay of the weight average; None for no average."""
    knobs: Configuration = field(default_factory=dict)
    """The tuner's choices, applied by `autobatch.step.apply_knobs`."""


def build_train_state(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    settings: StepSettings,
    meter: Meter,
    *,
    learning_rate: float | None = None,
) -> TrainState:
    """Build the optimizers, the loss scale and the weight average of a model that is on its device already.

    Without a learning rate, it is the workload's own.

    Raises:
        InputError: ``Workload(optimizer=…)`` returns no optimizer, or one that trains nothing in this
            precision.
    """
    knobs, precision = settings.knobs, settings.precision
    apply_layout(model, knobs)
    rate = workload.learning_rate if learning_rate is None else learning_rate
    optimizers = build_optimizers(workload, model, rate)
    apply_implementation(optimizers, knobs)
    parameters = list(parameters_of(optimizers))
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError(
            "Workload(optimizer=…) must train at least 1 parameter that requires a gradient, found 0 of "
            f"{len(parameters):,}: build it from the parameters that it receives, and leave some unfrozen"
        )
    if precision == "fp16" and any(parameter.dtype == torch.float16 for parameter in parameters):
        raise InputError(
            "--precision fp16 needs fp32 parameters, found fp16: keep them in fp32, or choose --precision "
            "fp32 to run them in their own type"
        )
    return TrainState(
        model=model,
        loss=apply_forward(workload.loss, model, knobs),
        counts=None if workload.counts is None else CountsAhead(workload.counts),
        optimizers=optimizers,
        parameters=parameters,
        device=device,
        precision=precision,
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        max_grad_norm=settings.max_grad_norm,
        gradients=Gradients(model, optimizers, dtype=settings.gradient_dtype),
        # Both passes over a batch must see the same buffers.
        buffers=BufferSnapshot(model, copy_all=isinstance(workload.loss, WholeBatchLoss)),
        meter=meter,
        average=None if settings.ema is None else WeightAverage(parameters, settings.ema),
    )


def precision_context(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return autocast for the forward pass of a micro-batch, or an empty context for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])
