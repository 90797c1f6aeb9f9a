"""Passes over some samples whose gradients can be compared, on copies of a model.

Each pass draws the same random numbers, and begins with the buffers and frozen parameters of the first.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.records import Precision
from autobatch.device.base import Meter
from autobatch.rehearsal.setup import Setup
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.loss import ONE, mean_of, terms_of
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import precision_context
from autobatch.step.whole_batch import WholeBatchPasses
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.nested import map_tensors, tensors_of, to_device
from autobatch.workload.rng import seed_everything
from autobatch.workload.user_code import user_code

ELEMENTS = 1024
"""Elements read from each parameter's gradient, evenly spaced: enough to compare, for any size of model."""
FP16_SCALE = 1024.0
"""Loss scale of fp16, in which gradients below 6e-8 would be 0."""
NAMED = 4
"""Names that a message lists of each kind."""


class PassType(NamedTuple):
    """The type of the tensors of a pass, and the mode of its modules."""

    dtype: torch.dtype | None
    """Floating-point type of the model and its batches; None to keep the types that they have."""
    precision: Precision = "fp32"
    """Precision of the forward pass; ``fp32`` for no autocast."""
    train_mode: bool = True


class Part(NamedTuple):
    """Some samples, collated."""

    batch: Collated
    size: int


@dataclass(frozen=True, slots=True)
class SampleGradient:
    """Gradient of the mean loss over some samples, or of its total if they count nothing."""

    elements: Tensor
    """Elements of the gradient, in float64 on the host."""
    weight: float
    """Weight of these samples in a batch: the count of their `Loss`, else their number."""
    is_counted: bool = False
    """True if the loss is a `Loss`."""


@contextmanager
def open_runner(setup: Setup, meter: Meter, kind: PassType) -> Iterator[GradientRunner]:
    """Run passes on temporary weights within the block, and leave no trace of them.

    In train mode dropout and BatchNorm stay in eval mode, because they make every pass differ. The meter
    counts the copies and the batches.
    """
    held = modules_of_loss(setup.workload.loss, setup.model)
    models = {"": setup.model, **held}
    state = PassState(models)
    with ExitStack() as stack:
        stack.callback(state.put_back)
        for model in models.values():
            stack.enter_context(temporary_weights(model, setup.device.torch_device))
        tensors = [tensor for one in models.values() for tensor in (*one.parameters(), *one.buffers())]
        for tensor in tensors:
            if kind.dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(kind.dtype)
        meter.count(tensor.data for tensor in tensors)
        if not kind.train_mode:
            setup.model.eval()
        for module in setup.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd | _BatchNorm):
                module.eval()
        yield GradientRunner(setup, meter, kind, state)


class GradientRunner:
    """Forward and backward passes over some samples on the device."""

    def __init__(self, setup: Setup, meter: Meter, kind: PassType, state: PassState) -> None:
        self._setup, self._meter, self._kind, self.state = setup, meter, kind, state
        self.loss: Any = setup.workload.loss
        self.model = setup.model
        self._scale = FP16_SCALE if kind.precision == "fp16" else 1.0
        own = {p.dtype if kind.dtype is None else kind.dtype for p in setup.model.parameters()}
        is_low = kind.precision == "bf16" or (kind.dtype is None and not own.isdisjoint(LOW_PRECISION))
        # Each part rounds its gradient, to 8 significant bits in bf16 and 11 in fp16. float32 also stands for
        # models with operations in TF32; float64 for those with some in float32.
        self.tolerance = 3e-2 if is_low else 1e-5 if own == {torch.float64} else 1e-2
        """Relative error that rounding stays below."""

    def run(self, part: Part, seed: int, term: str = ONE, *, from_start: bool = True) -> SampleGradient:
        """Run samples forward and backward as one micro-batch, with the draws of a seed.

        Args:
            part: on the host.
            seed: of the random numbers.
            term: the one of several terms of the loss to run.
            from_start: put back what earlier passes wrote before.
        """
        if from_start:
            self.state.put_back()
        terms = self.terms_of(part, seed)
        loss = terms[term] if term in terms else mean_of(terms)
        total, count = loss if isinstance(loss, Loss) else (loss, None)
        items = None if count is None else float(count.detach() if isinstance(count, Tensor) else count)
        if total.requires_grad:
            # In fp16 the gradient of a sum over many items would overflow.
            mean = (total.float() if total.dtype in LOW_PRECISION else total) / (items or 1.0)
            (mean * self._scale).backward()  # type: ignore[no-untyped-call]
        weight = float(part.size) if items is None else items
        return SampleGradient(self._take_gradient(), weight, items is not None)

    def run_cached(self, parts: list[Part], seed: int) -> SampleGradient:
        """Run micro-batches as a `WholeBatchLoss` trains, with the draws of a seed."""
        self.state.put_back()
        seed_everything(seed)
        samples = sum(part.size for part in parts)
        WholeBatchPasses(
            loss=self.loss,
            model=self._setup.model,
            autocast=self._autocast,
            scale=lambda value: value * self._scale,
            restore_buffers=self.state.put_back,
        ).run(_Placed(self, parts), samples)
        return SampleGradient(self._take_gradient(), float(samples))

    def terms_of(self, part: Part, seed: int) -> dict[str, Tensor | Loss]:
        """Run samples forward; return the terms of their loss."""
        seed_everything(seed)
        with self._autocast(), user_code("loss", self.loss):
            return terms_of(self.loss(self._setup.model, self.placed(part)))

    def placed(self, part: Part) -> Collated:
        """Return a copy of a batch on the device, in the type of the pass: a loss may change its batch."""
        dtype = self._kind.dtype
        with self._meter.uncounted():
            own = copy.deepcopy(part.batch)
            if dtype is not None:
                own = map_tensors(own, lambda one: one.to(dtype) if one.is_floating_point() else one)
            own = to_device(own, self._setup.device.torch_device)
        self._meter.count(tensors_of(own))
        return own

    def _autocast(self) -> AbstractContextManager[object]:
        return precision_context(self._setup.device.torch_device, self._kind.precision)

    def _take_gradient(self) -> Tensor:
        """Return elements of the gradient that the backward passes left, and clear it."""
        model = self._setup.model
        parts = [_elements(p) for p in model.parameters() if p.requires_grad]
        model.zero_grad(set_to_none=True)
        # Moved and converted at once: a model may have thousands of parameters.
        return torch.cat(parts).to("cpu", torch.float64) / self._scale


class _Placed(Iterable[tuple[Collated, int]]):
    """Parts on the device, as often as they are iterated."""

    def __init__(self, runner: GradientRunner, parts: list[Part]) -> None:
        self._runner, self._parts = runner, parts

    def __iter__(self) -> Iterator[tuple[Collated, int]]:
        """Begin a pass."""
        return ((self._runner.placed(part), part.size) for part in self._parts)


def _elements(parameter: nn.Parameter) -> Tensor:
    stride = max(1, parameter.numel() // ELEMENTS)
    if parameter.grad is None:
        return parameter.new_zeros(len(range(0, parameter.numel(), stride)))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().flatten()[::stride]


class _Slot(NamedTuple):
    """A buffer or a frozen parameter in its place."""

    registry: dict[str, Any]
    name: str
    tensor: Tensor
    data: Tensor
    """Its memory from before the temporary weights."""
    label: str
    """Words for a message; empty for statistics of BatchNorm."""

    def now(self) -> Tensor:
        found: Tensor | None = self.registry.get(self.name)
        return torch.empty(0, device="cpu") if found is None else found.detach()

    def is_written(self) -> bool:
        now, before = self.now(), self.data
        if now.shape != before.shape:
            return True
        if isinstance(self.tensor, nn.Parameter):
            stride = max(1, now.numel() // ELEMENTS)
            now, before = now.flatten()[::stride], before.flatten()[::stride]
        return not torch.equal(now, before.to(now.device, now.dtype))


class PassState:
    """The buffers and frozen parameters of modules, given before they get temporary weights.

    Each module has the name that a message calls it, which is empty for the model.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._slots: list[_Slot] = []
        for owner, root in modules.items():
            for path, module in root.named_modules():
                for registry in (module._buffers, module._parameters):
                    for name, tensor in registry.items():
                        if tensor is not None and not tensor.requires_grad:
                            kind = "frozen parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                            label = f"{kind} {'.'.join(filter(None, [owner, path, name]))}"
                            label = "" if isinstance(module, _BatchNorm) else label
                            self._slots.append(_Slot(registry, name, tensor, tensor.data, label))

    def put_back(self) -> None:
        """Undo what the passes wrote since the modules got temporary weights."""
        for slot in self._slots:
            if slot.registry.get(slot.name) is not slot.tensor or slot.is_written():
                slot.tensor.data = slot.data.to(slot.tensor.device, slot.tensor.dtype, copy=True)
                slot.registry[slot.name] = slot.tensor

    def written(self) -> dict[str, Tensor]:
        """Return copies of what differs now, by its label, without the statistics of BatchNorm."""
        return {slot.label: slot.now().clone() for slot in self._slots if slot.label and slot.is_written()}


def modules_of_loss(loss: object, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a loss is, or refers to, by the names of their classes; none of the model."""
    own = {id(module) for module in model.modules()}
    found: list[object] = []
    for part in [loss.represent, loss.loss] if isinstance(loss, WholeBatchLoss) else [loss]:
        function = part.func if isinstance(part, functools.partial) else part
        found += [function, getattr(function, "__self__", None)]
        if inspect.isfunction(function):
            used = inspect.getclosurevars(function)
            found += [*used.nonlocals.values(), *used.globals.values()]
    modules = {id(one): one for one in found if isinstance(one, nn.Module) and id(one) not in own}
    return {f"{type(one).__name__}{f' {at}' if at else ''}": one for at, one in enumerate(modules.values())}


def names_of(labels: Iterable[str]) -> str:
    """Return what was written in words: ``the buffers queue, pointer and the frozen parameter teacher``."""
    parts = []
    for kind in ("buffer", "frozen parameter"):
        names = sorted(label.removeprefix(f"{kind} ") for label in labels if label.startswith(f"{kind} "))
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if names:
            parts.append(f"the {kind}{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{more}")
    return " and ".join(parts)
