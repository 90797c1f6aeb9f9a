"""The allocations of a training step, recorded without running it, and fitted over the micro-batch.

    TracedStep ──record at 2, 3 and 5──► Program ──with notes and a margin──► Footprint

The recorded code is the code that trains (`autobatch.step.train_step.train_step`), on fake tensors that have
shapes and no memory, under CUDA's operator policy. The result is the trace that a meter on a device would
record.

Some operators need values that fakes do not have. They get values with which the step succeeds and is not
smaller than any real one: nothing overflows, and a selection by values keeps everything.

Tracing takes seconds and no memory, for any batch and GPU. Known limitations: eager PyTorch only (a compiled
model is traced as its module), and of streams those of FSDP2. Not counted is what kernels and libraries hold
for themselves, for example the workspaces of cuDNN, and custom CUDA extensions. The interval of a prediction
allows for it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from autobatch.core.errors import AutobatchError, InputError
from autobatch.device.allocator import Allocator
from autobatch.device.base import followed_modules
from autobatch.device.trace import Trace
from autobatch.device.tracker import UPDATES, StorageTracker, has_wrappers
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.policy import Capability, as_on_cuda, cuda_policy
from autobatch.footprint.program import Program, Untraceable
from autobatch.rehearsal.setup import Setup
from autobatch.step.gradients import parameters_of
from autobatch.step.train_state import Passes, TrainState, build_train_state
from autobatch.step.train_step import train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.nested import held, map_tensors, tensors_of
from autobatch.workload.rng import preserved_random_state

if TYPE_CHECKING:
    from autobatch.distributed.shard import Sharding


aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
"""Called more often than all other operators together, because autograd calls it for every fake."""
_QUERIES = frozenset({_DEVICE, aten._local_scalar_dense.default})
_OVERFLOW_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default
_CHECK = aten._is_all_true.default
"""The check of the arguments of a distribution."""
_PASSED = "_passed_a_check"
"""Attribute of the result of a check."""
_SELECTIONS = frozenset({aten.nonzero.default, aten.masked_select.default, aten.index.Tensor})
"""Operators whose result has a size that depends on values."""
_REDUCED = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
"""Losses that write one value per element into their result and then shrink it to one number, with the index
of their reduction argument. The storage keeps its size (ATen/native/Loss.cpp), which fakes do not show."""
_WAIT = "_c10d_functional::wait_tensor"
"""Returns its argument; the fake one has a storage of its own."""
CONVOLUTIONS = "convolutions: no trace shows the scratch memory of cuDNN, so the interval allows 10 % for it"
SELECTIONS = "selections by values: predicted as if they kept everything, which is their largest result"
SIZES = (2, 3, 5)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it."""
MARGIN = 0.03
"""Share of a budget that the lower end of an interval leaves, as no trace shows what libraries hold."""
CONVOLUTION_MARGIN = 0.1
"""The same with convolutions, because the scratch memory of cuDNN may take hundreds of MiB."""
RECURRENT = "recurrent layers: no trace shows what cuDNN keeps, so the size of their gates is counted instead"


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """A storage tracker for fakes that supplies missing values."""

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__(Allocator(), storage_device="meta")
        self._on_gpu = on_gpu
        self.notes: set[str] = set()
        """Remarks on what the trace does not show."""
        self._found_inf: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on fakes; see the class."""
        if has_wrappers(types):
            return self._on_wrapper(func, args, kwargs)
        if func in _QUERIES:
            return args[0].fake_device if func is _DEVICE else self._value_of(args[0])
        if _is_in_place_foreach(func):
            return None
        is_update = func in UPDATES and type(args[0]) is FakeTensor and args[0].layout is torch.strided
        if is_update or func.name() == _WAIT:
            # Running an update on fakes takes half of an optimizer step.
            self.settle()
            return args[0]
        if self._on_gpu and func is aten.lift_fresh.default:
            # ``torch.tensor(1.0)`` without a device is on the host, with a GPU too.
            return func(*args, **(kwargs or {}))
        if func is aten.convolution.default:
            self.notes.add(CONVOLUTIONS)
        elif func is _OVERFLOW_CHECK:
            self._found_inf.add(args[1].untyped_storage()._cdata)
        elif func in _SELECTIONS:
            func, args, kwargs = self._select_all(func, args)
        if func in _REDUCED and (args[_REDUCED[func]] if len(args) > _REDUCED[func] else 1):
            func = _loss_per_element
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _CHECK:
            vars(out)[_PASSED] = True
        return out

    def _on_wrapper(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an operator on tensors that wrap others, such as those sharded over ranks."""
        if _is_in_place_foreach(func):
            return None
        if func not in _QUERIES and not self._aside:
            # Once unseen: the first call also makes fakes of the size of whole tensors, for their shapes.
            func(*args, **(kwargs or {}))
        return NotImplemented

    def _value_of(self, tensor: Tensor) -> float | int | bool:
        """Return a value for ``.item()`` with which a step succeeds: no overflow, valid values, 1 of each."""
        if tensor.untyped_storage()._cdata in self._found_inf:
            return 0.0
        # Torch computes with single numbers of the user's code.
        value = tensor.constant if isinstance(tensor, FakeTensor) else None
        if value is not None and not value.is_floating_point():
            with no_dispatch():
                return value.item()
        if tensor.dtype is torch.bool:
            return _PASSED in vars(tensor)
        # Neither 0 nor 1, because optimizers divide by a value and by its difference from 1.
        return 0.5 if tensor.is_floating_point() else 1

    def _select_all(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return operator and arguments of a selection that keeps everything."""
        x, numbers = args[0], {"dtype": torch.int64, "device": torch.device("cpu")}
        empty = aten.empty.memory_format
        if func is aten.nonzero.default:
            self.notes.add(SELECTIONS)
            return empty, ([x.numel(), x.dim()],), numbers
        if func is aten.masked_select.default:
            self.notes.add(SELECTIONS)
            size = prod(map(max, zip_longest(x.shape[::-1], args[1].shape[::-1], fillvalue=1)))
            return empty, ([size],), numbers | {"dtype": x.dtype}
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.notes.add(SELECTIONS)
                # The operator allocates whole numbers unseen, one for each dimension.
                make = super().__torch_dispatch__
                indices += [make(empty, (), ([index.numel()],), numbers) for _ in range(index.dim())]
            else:
                indices.append(index)
        return func, (x, indices, *args[2:]), {}


def _is_in_place_foreach(func: Any) -> bool:
    """Check for an operator in place over hundreds of tensors, which allocates nothing and takes long."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _loss_per_element(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    """Return one number in a storage with one element per pair of broadcast elements."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    each = torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    one: Tensor = aten.as_strided.default(each, [], [])
    return one


def fake_copy(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake CPU tensor with the same shape, strides and type; a parameter if it is one."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model with fake tensors, in which tied tensors stay tied.

    Raises:
        Exception: a module of the user's cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)  # the module itself, if the model is compiled
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
    # deepcopy takes copies from its memo, so it never reads a tensor.
    memo: dict[int, Any] = {id(tensor): fake_copy(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


STEPS = (1, 2)
"""Micro-batches of each step. Adam's state appears in the first step, and ``.grad`` is resident while the
second micro-batch of the other one runs. Every later step does the same as that one."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """Everything that a trace of a step depends on."""

    setup: Setup
    """With a model that may be on ``meta``, and a device that nothing runs on."""
    capability: Capability | None
    """Compute capability of the GPU; None for the CPU with its own operators."""
    multiple: int = 1
    """Number whose multiples the step runs at."""
    steps: Sequence[int] = STEPS
    """Micro-batches of each step."""
    sharding: Callable[[], AbstractContextManager[Sharding | None]] = nullcontext
    """Acts as a rank within a block, and gives the way in which ranks share a model; None for a whole one."""

    def changed(self, **values: Any) -> TracedStep:
        """Return the same with other values of the setup."""
        return replace(self, setup=replace(self.setup, **values))


class Recording(NamedTuple):
    """The trace of the steps of an attempt."""

    trace: Trace
    """Canonical: blocks are numbered in the order of their allocation."""
    notes: frozenset[str]
    """Remarks on what the trace does not show."""


def record(step: TracedStep, micro_batch: int, batch: Collated | None = None) -> Recording:
    """Trace the steps of an attempt at a micro-batch, the worst case if none is given.

    Raises:
        Exception: the user's code or torch cannot run the step without the values of its tensors.
    """
    # A real tensor in the user's code becomes a fake in its first operator.
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder(on_gpu=step.capability is not None)
    setup = step.setup
    batch = setup.worst_case.batch(micro_batch) if batch is None else batch
    # What cannot be traced is told in one line.
    logging.getLogger(fake_tensor.__name__).disabled = True

    def place(batch: Collated) -> Collated:
        with recorder.uncounted():
            fake = map_tensors(batch, partial(fake_copy, mode=mode))
        recorder.count(tensors_of(fake))
        return fake

    def micro_batches(count: int) -> Iterable[tuple[Collated, int]]:
        placed = Passes(lambda: ((place(batch), micro_batch) for _ in range(count)))
        if isinstance(setup.workload.loss, WholeBatchLoss):
            return placed
        return held(placed) if setup.keeps_batches else placed

    with preserved_random_state(), ExitStack() as stack:
        sharding = stack.enter_context(step.sharding())
        model = fake_model(setup.model, mode)
        # oneDNN hides the gates of recurrent layers. Single operators show tensors, about as large as what
        # cuDNN keeps.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None))
        stack.enter_context(mode)
        if step.capability is not None:
            stack.enter_context(cuda_policy(step.capability))
        stack.enter_context(recorder)
        stack.enter_context(followed_modules(model, recorder))
        train_state = _build(step, model, recorder, sharding)
        for count in step.steps:
            samples = batch_samples(setup.whole_batch, micro_batch, count)
            train_step(train_state, micro_batches(count), samples)
    trace = recorder.trace()
    assert trace is not None
    return Recording(trace, frozenset(recorder.notes))


def _build(step: TracedStep, model: nn.Module, recorder: Recorder, sharding: Sharding | None) -> TrainState:
    """Build the train state on a fake model."""
    recorder.mark("setup")
    sharded = None
    if sharding is not None:
        # Ranks build their parts only, so the whole model is never on a device.
        with recorder.uncounted():
            sharded = sharding(model, step.setup.precision)
    workload, host = step.setup.workload, torch.device("cpu")
    train_state = build_train_state(workload, model, host, step.setup, recorder)
    if parameters_of(train_state.optimizers).keys().isdisjoint(model.parameters()):
        raise RuntimeError("the optimizer is that of another model, which a trace must not train")
    for optimizer in train_state.optimizers:
        # Torch's check for CUDA graphs asks the current GPU (torch/optim/optimizer.py), and so opens a
        # context on one that nobody has chosen.
        setattr(optimizer, "_accelerator_graph_capture_health_check", lambda: None)  # noqa: B010 - a method
        if step.capability is not None:
            as_on_cuda(optimizer)
    if sharded is not None:
        sharded.attach(train_state)
    return train_state


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - describes the step, not a fault
    """A step whose footprint cannot be predicted, with the reason in one line."""


class Footprint(NamedTuple):
    """The allocations of a step at any micro-batch."""

    program: Program
    margin: float
    """Share of a budget by which a prediction may be too high."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""
    multiple: int = 1
    """The number whose multiples the step runs at."""


def footprint(step: TracedStep) -> Footprint:
    """Trace a step at a few small micro-batches, and fit a program to its allocations.

    Raises:
        InputError: the user's code is invalid.
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    (found,) = footprints([step])
    if isinstance(found, AutobatchError):
        raise found
    return found


def footprints(steps: Sequence[TracedStep]) -> list[Footprint | AutobatchError]:
    """Do as `footprint` for several steps at the same time. One that fails gives its error."""
    asked = []
    for step in steps:
        for size in SIZES:
            # Augmented data draw the same random numbers for each size.
            with preserved_random_state():
                batch = step.setup.worst_case.batch(step.multiple * size)
            # The first step of the largest size checks the two others.
            made = replace(step, steps=step.steps[:1]) if size == SIZES[-1] else step
            asked.append(partial(_recorded, made, step.multiple * size, batch))
    traced, count = run_in_copies(asked), len(SIZES)
    return [_fitted(step, traced[count * at : count * (at + 1)]) for at, step in enumerate(steps)]


def _fitted(step: TracedStep, traced: Sequence[Recording | AutobatchError]) -> Footprint | AutobatchError:
    """Fit a program to two traces, and check it with the third; return the error if that fails."""
    for found in traced:
        if isinstance(found, AutobatchError):
            return found
    small, larger, largest = (found for found in traced if isinstance(found, Recording))
    sizes = [step.multiple * size for size in SIZES]
    try:
        program = Program.fit([(sizes[0], small.trace), (sizes[1], larger.trace)])
    except Untraceable as error:
        return Unpredictable(f"cannot predict: {error}")
    if program.at(sizes[2]).events[: len(largest.trace.events)] != largest.trace.events:
        return Unpredictable("cannot predict: the sizes of its allocations are no line in the micro-batch")
    notes = sorted(small.notes)
    is_recurrent = any(isinstance(part, nn.RNNBase) for part in step.setup.model.modules())
    margin = CONVOLUTION_MARGIN if CONVOLUTIONS in notes else MARGIN
    return Footprint(program, margin, (*notes, *[RECURRENT] * is_recurrent), step.multiple)


def _recorded(step: TracedStep, size: int, batch: Collated) -> Recording | AutobatchError:
    """Trace a step at a size, on a batch that was read before; return the error if it cannot be traced."""
    try:
        return record(step, size, batch)
    except InputError as error:
        return error
    except (Exception, SystemExit) as error:
        is_odd = step.multiple == 1 and isinstance(error, AssertionError | ValueError)
        end = ". If it runs at multiples of a number only, give --micro-batch-multiple" if is_odd else ""
        if hasattr(error, "func"):  # torch's own errors of fakes
            return Unpredictable(f"cannot predict: {error.func} needs the values of the data{end}")
        kind, text = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:200]
        return Unpredictable(f"cannot predict: the step does not run without values ({kind}: {text}){end}")
