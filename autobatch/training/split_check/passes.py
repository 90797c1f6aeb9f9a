"""Passes over chosen samples that can be compared: from the same state, with the same draws for a sample.

Each pass begins with the buffers and frozen parameters of the first, and returns its gradient. If passes
draw at random, functional dropout becomes the identity, and the draws over the whole batch are recorded: a
part gets the rows of its samples. A draw whose shape does not grow with the batch is the same for all parts.
A draw of another kind is a doubt: after it, a difference between the whole and its parts proves nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
from autobatch.workload.rng import seed_everything, seed_torch

ELEMENTS = 1024
"""Elements read from each parameter's gradient, evenly spaced: enough to compare, for any size of model."""
FP16_SCALE = 1024.0
"""Loss scale of fp16, in which gradients below 6e-8 would be 0."""
NAMED = 4
"""Names that a message lists of each kind."""
SEED = 1
DROPOUTS = {
    f"{prefix}dropout{suffix}"
    for prefix in ("", "alpha_", "feature_", "feature_alpha_")
    for suffix in ("", "_", "1d", "2d", "3d")
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Layers with a dropout between them, their only argument that is a float."""
ELEMENTWISE = {
    *("uniform_", "normal_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("bernoulli", "rand_like", "randn_like", "randint_like", "normal", "poisson", "binomial"),
    *("rand", "randn", "randint"),
}
"""Operators that draw each element alone, so that some rows of a draw are a draw of their own."""


@dataclass(frozen=True, slots=True)
class SampleGradient:
    """Gradient of the mean loss over some samples, or of its total if they count nothing."""

    elements: Tensor
    """Elements of the gradient, in float64 on the host."""
    count: float | None
    """Count of the `Loss`; None if the loss is a mean over samples."""
    samples: int

    @property
    def weight(self) -> float:
        """Weight of these samples in a batch: their count, else their number."""
        return float(self.samples) if self.count is None else self.count


class PassType(NamedTuple):
    """The type of the tensors of a pass, and the mode of its modules."""

    dtype: torch.dtype | None
    """Floating-point type of the model and its batches; None to keep the types that they have."""
    train_mode: bool
    precision: Precision = "fp32"
    """Precision of the forward pass; ``fp32`` for no autocast."""


@contextmanager
def open_runner(setup: Setup, meter: Meter, kind: PassType) -> Iterator[GradientRunner]:
    """Run passes on temporary weights within the block, and leave no trace of them.

    In train mode dropout and BatchNorm stay in eval mode, because they make every pass differ. The meter
    counts the copies and the batches.
    """
    held = held_modules(setup.workload.loss, setup.model)
    models = [setup.model, *held.values()]
    state = PassState({"": setup.model, **held})
    with ExitStack() as stack:
        stack.callback(state.put_back)
        for one in models:
            stack.enter_context(temporary_weights(one, setup.device.torch_device))
        tensors = [tensor for one in models for tensor in (*one.parameters(), *one.buffers())]
        for tensor in tensors:
            if kind.dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(kind.dtype)
        meter.count(tensor.data for tensor in tensors)
        setup.model.train(kind.train_mode)
        for module in setup.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd | _BatchNorm):
                module.eval()
        yield GradientRunner(setup, meter, kind, state)


class GradientRunner:
    """Forward and backward passes over chosen samples, each from the same state of a model on the device."""

    def __init__(self, setup: Setup, meter: Meter, kind: PassType, state: PassState) -> None:
        self._setup, self._meter, self._kind = setup, meter, kind
        self.model = setup.model
        self.state = state
        self.term = ONE
        """Name of the one of several terms that passes run; `ONE` for all of them."""
        self._scale = FP16_SCALE if kind.precision == "fp16" else 1.0
        own = {p.dtype if kind.dtype is None else kind.dtype for p in self.model.parameters()}
        is_low = kind.precision == "bf16" or (kind.dtype is None and not own.isdisjoint(LOW_PRECISION))
        # Each part rounds its gradient, to 8 significant bits in bf16 and 11 in fp16. float32 also stands for
        # models with operations in TF32; float64 for those with some in float32.
        self.tolerance = 3e-2 if is_low else 1e-5 if own == {torch.float64} else 1e-2
        """Relative error that splitting a batch stays below."""

    def run(self, batch: Collated, samples: int, *, from_start: bool = True) -> SampleGradient:
        """Run a collated batch of this many samples forward and backward in one micro-batch.

        The batch is on the host. With ``from_start``, what earlier passes wrote is put back before.
        """
        if from_start:
            self.state.put_back()
        loss = self.loss_of(batch)
        total, count = loss if isinstance(loss, Loss) else (loss, None)
        items = None if count is None else float(count.detach() if isinstance(count, Tensor) else count)
        if total.requires_grad:
            # In fp16 the gradient of a sum over many items would overflow.
            mean = (total.float() if total.dtype in LOW_PRECISION else total) / (items or 1.0)
            (mean * self._scale).backward()  # type: ignore[no-untyped-call]
        return SampleGradient(self._take_gradient(), items, samples)

    def run_cached(self, micro_batches: Iterable[tuple[Collated, int]], samples: int) -> Tensor:
        """Run micro-batches, as a `WholeBatchLoss` trains; they are placed, and can be iterated twice."""
        loss = self._setup.workload.loss
        assert isinstance(loss, WholeBatchLoss)
        self.state.put_back()
        passes = WholeBatchPasses(
            loss=loss,
            model=self.model,
            autocast=self._autocast,
            scale=lambda value: value * self._scale,
            restore_buffers=self.state.put_back,
        )
        passes.run(micro_batches, samples)
        return self._take_gradient()

    def loss_of(self, batch: Collated) -> Tensor | Loss:
        """Run a collated batch forward in one micro-batch; return the chosen term, or the loss."""
        terms = self.terms_of(batch)
        return terms[self.term] if self.term in terms else mean_of(terms)

    def terms_of(self, batch: Collated) -> dict[str, Tensor | Loss]:
        """Run a collated batch forward in one micro-batch; return the terms of its loss."""
        with self._autocast():
            return terms_of(self._setup.workload.loss(self.model, self.placed(batch)))

    def placed(self, batch: Collated) -> Collated:
        """Return a copy of a collated batch on the device, in the runner's floating-point type.

        A loss may change its batch in place.
        """
        dtype = self._kind.dtype
        with self._meter.uncounted():
            own = copy.deepcopy(batch)
            if dtype is not None:
                own = map_tensors(own, lambda one: one.to(dtype) if one.is_floating_point() else one)
            own = to_device(own, self._setup.device.torch_device)
        self._meter.count(tensors_of(own))
        return own

    def _autocast(self) -> AbstractContextManager[object]:
        return precision_context(self._setup.device.torch_device, self._kind.precision)

    def _take_gradient(self) -> Tensor:
        """Return elements of the gradient that the backward passes left, and clear it."""
        parts = [_elements(p) for p in self.model.parameters() if p.requires_grad]
        self.model.zero_grad(set_to_none=True)
        # Moved and converted at once: a model may have thousands of parameters.
        return torch.cat(parts).to("cpu", torch.float64) / self._scale


def _elements(parameter: nn.Parameter) -> Tensor:
    stride = max(1, parameter.numel() // ELEMENTS)
    if parameter.grad is None:
        return parameter.new_zeros(len(range(0, parameter.numel(), stride)))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    flat = gradient.detach().flatten()
    return flat if stride == 1 else flat[::stride]


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
    """The buffers and frozen parameters of some modules, given before they get temporary weights.

    Each module has the name that a message calls it, which is empty for the model.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
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


def held_modules(loss: object, model: nn.Module) -> dict[str, nn.Module]:
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


def names_of(labels: list[str]) -> str:
    """Return what was written in words: ``the buffers queue, pointer and the frozen parameter teacher``."""
    parts = []
    for kind in ("buffer", "frozen parameter"):
        names = [label.removeprefix(f"{kind} ") for label in labels if label.startswith(f"{kind} ")]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if names:
            parts.append(f"the {kind}{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{more}")
    return " and ".join(parts)


class NoDropout(TorchFunctionMode):
    """A mode in which functional dropout returns its input."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, without its dropout."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "native_dropout":
            whole = args[0] if args else kwargs["input"]
            return whole, torch.ones_like(whole, dtype=torch.bool)
        if name == "scaled_dot_product_attention":
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if name in RECURRENT:
            args = tuple(0.0 if isinstance(one, float) else one for one in args)
        if name == "multi_head_attention_forward":
            # This function of Python calls the others where no mode sees them.
            kwargs["training"] = False
        return func(*args, **kwargs)


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the draws of a pass over a whole batch, and gives each part its rows of them."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.doubts: set[str] = set()
        """Draws that could not be made the same for a sample, in words."""
        self.is_flat = False
        """True if a draw had several rows per sample: all of them in a block, or each a batch apart."""
        self.is_interleaved = False
        """Whether the rows of a sample are taken to be a batch apart (time before batch)."""
        self._samples = samples
        self._first = 0
        self._size = samples
        self._is_recording = False
        self._recorded: dict[int, Tensor] = {}
        """The draws of the whole batch, by their keys."""
        self._ends: set[int] = set()

    def record(self) -> None:
        """Begin a pass over the whole batch, whose draws are recorded."""
        self._recorded.clear()
        self._ends.clear()
        self._is_recording = True
        self.place(0, self._samples)
        seed_everything(SEED)

    def replay(self, first: int, size: int) -> None:
        """Begin a pass over ``size`` samples from ``first`` on, with the draws recorded for them."""
        self._is_recording = False
        self.place(first, size)
        seed_everything(SEED)

    def place(self, first: int, size: int) -> None:
        """Set which samples the following draws are for."""
        self._first, self._size = first, size

    def end(self) -> None:
        """Note after a pass what Python and NumPy drew: passes must draw alike to be comparable."""
        numpy = sys.modules.get("numpy")
        drawn: tuple[bytes, int] | None = None
        if numpy is not None:
            _, words, position, *_ = numpy.random.get_state()
            drawn = words.tobytes(), position
        self._ends.add(hash((random.getstate(), drawn)))
        if len(self._ends) > 1:
            self.doubts.add("numbers from Python or NumPy")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; a random one returns what was recorded for its samples."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        # Attention draws for its dropout only, which is off.
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in name:
            return func(*args, **kwargs)
        # From the generator, so that a recomputed forward pass finds the same keys.
        key = int(torch.randint(2**62, (), device="cpu"))
        own = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        states = [(one, one.get_state()) for one in own]
        after = torch.get_rng_state()
        try:
            _seed(key, own)
            found = func(*args, **kwargs)
            return self._same(key, name, found)
        finally:
            torch.set_rng_state(after)
            for generator, state in states:
                generator.set_state(state)

    def _same(self, key: int, name: str, found: Any) -> Any:
        """Return a draw with the values that were recorded for its samples."""
        if name not in ELEMENTWISE:
            self.doubts.add(name)
            return found
        if self._is_recording and key not in self._recorded:
            self._recorded[key] = found.clone()
        known = self._recorded.get(key)
        rows = None if known is None else self._rows(known, found.shape)
        if rows is None:
            self.doubts.add(name)
            return found
        return found.copy_(rows)

    def _rows(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the rows of a recorded draw that belong to the samples; None if it is not clear which."""
        if whole.shape == shape:
            return whole
        differ = [axis for axis, (one, own) in enumerate(zip(whole.shape, shape, strict=False)) if one != own]
        if whole.dim() != len(shape) or len(differ) != 1 or whole.shape[differ[0]] % self._samples:
            return None
        axis = differ[0]
        each = whole.shape[axis] // self._samples
        if shape[axis] != each * self._size:
            return None
        self.is_flat |= each > 1
        if self.is_interleaved:
            apart = whole.reshape(*whole.shape[:axis], each, self._samples, *whole.shape[axis + 1 :])
            return apart.narrow(axis + 1, self._first, self._size).reshape(shape)
        return whole.narrow(axis, self._first * each, self._size * each)


def _seed(key: int, own: list[torch.Generator]) -> None:
    # The CPU's generator takes 32 bits of a seed.
    seed = hash(key) & 0xFFFFFFFF
    seed_torch(seed)
    for generator in own:
        generator.manual_seed(seed)
