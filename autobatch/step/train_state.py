"""A model with everything that its optimizer step needs: its optimizers, built and checked, and its average.

After every optimizer step ``a ← a + (1 - decay) · (w - a)`` (``torch.optim.swa_utils.get_ema_multi_avg_fn``).
Averages are kept in float32 at least, because bf16 would lose an update of 0.001 on a weight of 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autobatch.core.errors import InputError
from autobatch.core.records import Configuration, GradientDtype, Precision
from autobatch.device.base import Meter
from autobatch.step.apply_knobs import apply_forward, apply_implementation, apply_layout
from autobatch.step.gradients import Gradients, Optimizers, local_parts, parameters_of
from autobatch.step.loss import CountsAhead
from autobatch.step.restore import BufferSnapshot
from autobatch.workload.contract import Collated, LossFunction, WholeBatchLoss, Workload, kind_of
from autobatch.workload.nested import map_tensors, tensors_of, to_device
from autobatch.workload.user_code import user_code

MicroBatches = Iterable[tuple[Collated, int]]
"""Micro-batches, each with its number of samples."""
AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class TrainState:
    """A model with everything that its optimizer step needs."""

    model: nn.Module
    loss: LossFunction
    optimizers: Optimizers
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

    The meter counts its tensors from here on. Without a learning rate, it is the workload's own.

    Raises:
        InputError: ``Workload(optimizer=…)`` returns no optimizer, or one that cannot train a batch in parts.
    """
    knobs, precision = settings.knobs, settings.precision
    meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
    apply_layout(model, knobs)
    rate = workload.learning_rate if learning_rate is None else learning_rate
    optimizers = build_optimizers(workload, model, rate)
    apply_implementation(optimizers, knobs)
    return TrainState(
        model=model,
        loss=apply_forward(workload.loss, model, knobs),
        counts=None if workload.counts is None else CountsAhead(workload.counts),
        optimizers=optimizers,
        device=device,
        precision=precision,
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        max_grad_norm=settings.max_grad_norm,
        gradients=Gradients(model, optimizers, dtype=settings.gradient_dtype),
        # Both passes over a batch must see the same buffers.
        buffers=BufferSnapshot(model, copy_all=isinstance(workload.loss, WholeBatchLoss)),
        meter=meter,
        average=None if settings.ema is None else WeightAverage(parameters_of(optimizers), settings.ema),
    )


def precision_context(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Return autocast for the forward pass of a micro-batch, or an empty context for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])


def build_optimizers(workload: Workload, model: nn.Module, learning_rate: float) -> Optimizers:
    """Build the optimizers of a model, ready to train.

    Raises:
        InputError: ``Workload(optimizer=…)`` returns no optimizer, or one with other weights for its
            evaluation.
    """
    with user_code("optimizer", workload.optimizer):
        optimizers = _call(workload, model, learning_rate)
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    "Workload(optimizer=…) must return a torch.optim.Optimizer or a list of them, found "
                    f"{kind_of(optimizer)}"
                )
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                raise InputError(
                    f"{type(optimizer).__name__} switches its weights by train() and eval(), which autobatch "
                    "does not call: plan with the optimizer that it is made of, for example AdamW, and use "
                    "autobatch.batches in your own loop (docs/loops.md)"
                )
    return optimizers


def stand_in_optimizers(workload: Workload) -> list[torch.optim.Optimizer]:
    """Build the workload's optimizers for a stand-in parameter; none if they need the model's own."""
    stand_in = nn.ParameterList([nn.Parameter(torch.zeros(1, device="cpu"))])
    try:
        made = _call(workload, stand_in, workload.learning_rate)
    except Exception:
        return []
    return [built for built in made if isinstance(built, torch.optim.Optimizer)]


def _call(workload: Workload, model: nn.Module, learning_rate: float) -> tuple[Any, ...]:
    """Call the optimizer function with what the name of its first argument asks for.

    That is the model, pairs of name and parameter, or the parameters for any other name.
    """
    try:
        name = next(iter(inspect.signature(workload.optimizer).parameters), "")
    except (TypeError, ValueError):  # a class or a built-in without a signature
        name = ""
    given: Any = model.parameters()
    if name in ("model", "module"):
        given = model
    elif name in ("named_parameters", "named_params"):
        given = model.named_parameters()
    made = workload.optimizer(given, learning_rate)
    return tuple(made) if isinstance(made, list | tuple) else (made,)


class WeightAverage:
    """The averages of trained parameters, each starting at its weight.

    Buffers are not averaged: running statistics are averages already. That of a frozen parameter is itself.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = list(parameters)
        self._averages = [
            parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for parameter in self._parameters
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, without waiting for the device."""
        move = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        averages, weights = local_parts(self._averages), local_parts([*self._parameters])
        same = [pair for pair in zip(averages, weights, strict=True) if pair[0].dtype == pair[1].dtype]
        if same:
            move(*map(list, zip(*same, strict=True)), 0)
        for average, weight in zip(averages, weights, strict=True):
            if average.dtype != weight.dtype:
                # One at a time: float32 copies of all weights together would raise the peak.
                move([average], [weight.to(average.dtype)], 0)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the values of the weights by the averages, rounded to their types, within the block."""
        weights = local_parts([parameter.detach() for parameter in self._parameters])
        saved = [weight.clone() for weight in weights]
        try:
            for weight, average in zip(weights, local_parts(self._averages), strict=True):
                weight.copy_(average)
            yield
        finally:
            for weight, value in zip(weights, saved, strict=True):
                weight.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the decay and one average per parameter."""
        return {"decay": self.decay, "averages": self._averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the averages by those that `state_dict` returned for the same parameters."""
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)
