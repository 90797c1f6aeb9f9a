"""A dispatch mode that records a training step on fake tensors: its allocations, with a label per block.

Some operators need values that fakes do not have. They get values with which the step succeeds and is not
smaller than any real one: nothing overflows, and a selection by values keeps everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.onednn_workspace import Workspaces, whole_pages
from autobatch.device.allocator.trace import Trace, repetition
from autobatch.device.allocator.tracker import UPDATES, StorageTracker, has_wrappers
from autobatch.device.profiles import USUAL_PROCESSORS
from autobatch.footprint.program import DerivedSize, Origin, TooLong
from autobatch.footprint.reductions import Reduction, scratch_bytes
from autobatch.footprint.tracing.fakes import value_of
from autobatch.footprint.tracing.kernels import (
    Memory,
    adds_bias_in_product,
    kernel_of,
    kernel_on_gpu,
    operators,
)

aten = torch.ops.aten
_PRODUCTS = frozenset(operators("mm addmm bmm baddbmm mv addmv dot vdot"))
"""Operators that run on cuBLAS."""
_DEVICE = torch.ops.prim.device.default
"""Called more often than all other operators together, because autograd calls it for every fake."""
_QUERIES = frozenset({_DEVICE, aten._local_scalar_dense.default})
_RECURRENT = aten.mkldnn_rnn_layer.default
_OVERFLOW_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default
_CHECK = aten._is_all_true.default
"""The check of the arguments of a distribution."""
_PASSED = "_passed_a_check"
"""Attribute of the result of a check."""
_SELECTIONS = frozenset({aten.nonzero.default, aten.masked_select.default, aten.index.Tensor})
"""Operators whose result has a size that depends on values."""
GATHERED = "gathered layers"
"""Kind of the parameters of all ranks that a rank holds while a layer runs."""
_COLLECTIVES = {
    "fsdp::all_gather_copy_in": GATHERED,
    "fsdp::split_with_sizes_copy": GATHERED,
    "fsdp::chunk_cat": "gradients",
}
"""FSDP's own operators, with the kind of what they copy between layers and messages."""
_WAIT = "_c10d_functional::wait_tensor"
"""Returns its argument; the fake one has a storage of its own."""
_MASKS = (torch.bool, torch.uint8)


class Label(NamedTuple):
    """The purpose and the origin of a block."""

    kind: str
    """``parameters``, ``averaged weights``, ``gathered layers``, ``gradients``, ``optimizer state``,
    ``batch``, ``activations`` or ``temporaries``."""
    module: str
    """Name of the module whose forward made the block; empty outside of any."""


class Product(NamedTuple):
    """A matrix product, for which cuBLAS takes a workspace on a GPU."""

    at: int
    """Number of events after its result was taken."""
    is_backward: bool
    """True in the thread of the backward pass."""
    is_fused: bool
    """True if cuBLASLt runs it, and adds the bias at once."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The trace of an attempt, with labels."""

    trace: Trace
    """Canonical: blocks are numbered in the order of their allocation."""
    labels: tuple[Label, ...]
    """By block number."""
    products: tuple[Product, ...]
    has_convolutions: bool
    has_selections: bool
    """True if a selection by values was recorded as if it kept everything."""
    has_reads: bool = False
    """True if NumPy read values that were made up."""
    derived: Mapping[int, DerivedSize] = field(default_factory=dict)
    """Blocks whose sizes follow from other numbers by the rule of a library."""


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """A storage tracker for fakes that labels blocks and supplies missing values.

    Args:
        on_gpu: record the operators of a GPU, with the scratch memory of its attention.
        most_operators: operators after which the trace ends; None for no limit.
    """

    def __init__(self, *, on_gpu: bool, most_operators: int | None = None) -> None:
        super().__init__(CountingAllocator(), storage_device="meta", on_new=self._label_new)
        self._on_gpu = on_gpu
        self._most_operators = most_operators
        self._operators = 0
        self.modules: list[str] = []
        """Names of the modules whose forward runs, the innermost last."""
        self._labels: list[Label] = []
        self._phase = "setup"
        self._products: list[Product] = []
        self._has_convolutions = False
        self._has_selections = self._has_reads = False
        self._found_inf: set[int] = set()
        self._workspaces = Workspaces()
        self._derived: dict[int, DerivedSize] = {}
        self._repeated: Trace | None = None
        self._resizes = False

    def bookmark(self) -> tuple[int, int]:
        """Return the number of events and of marks so far."""
        return len(self.events), len(self._marks)

    def repeat(self, since: tuple[int, int]) -> bool:
        """Record everything since a `bookmark` once more without running it.

        Returns:
            False if that is wrong, because the blocks alive now differ from those alive at the bookmark.
        """
        trace = self.trace()
        again = None if trace is None else repetition(trace, *since)
        if trace is None or again is None:
            return False
        self._repeated = trace.followed_by(again)
        first = len(self._labels) - again.blocks
        self._derived |= {block + again.blocks: one for block, one in self._derived.items() if block >= first}
        self._labels += self._labels[first:]
        shift = len(trace.events) - since[0]
        self._products += [one._replace(at=one.at + shift) for one in self._products if one.at > since[0]]
        return True

    def recording(self) -> Recording:
        """Return the recording, outside of the mode."""
        # Frees after a repetition belong to the end of the run, where no peak depends on them.
        trace = self._repeated or self.trace()
        assert trace is not None
        return Recording(
            trace=trace.canonical(),
            labels=tuple(self._labels),
            products=tuple(self._products),
            has_convolutions=self._has_convolutions,
            has_selections=self._has_selections,
            has_reads=self._has_reads,
            derived=dict(self._derived),
        )

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        super().mark(phase)
        self._phase = phase

    def count_as(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made elsewhere, and label them."""
        counted = list(tensors)
        self.count(counted)
        self.label(kind, counted)

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Label the blocks of tensors."""
        for tensor in tensors:
            for block in self.blocks_of(tensor):
                self._labels[block] = self._labels[block]._replace(kind=kind)

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
        self._observe(func, args, kwargs)
        if func in _SELECTIONS:
            func, args, kwargs = self._select_all(func, args, kwargs)
        kernel = kernel_of(func, args, on_gpu=self._on_gpu)
        on_gpu = kernel_on_gpu(func) if self._on_gpu else None
        if on_gpu is None or self._aside:
            out = super().__torch_dispatch__(kernel, types, args, kwargs)
        else:
            self.settle()
            out = kernel(*args, **(kwargs or {}))
            self._take(on_gpu(out, *args))
        if func in _PRODUCTS:
            is_backward = torch._C._current_graph_task_id() >= 0
            is_fused = func is aten.addmm.default and adds_bias_in_product(*args[:3], **(kwargs or {}))
            self._products.append(Product(len(self.events), is_backward, is_fused))
        if func is _RECURRENT:
            out = (*out[:3], self._workspace(args))
        if func is _CHECK:
            vars(out)[_PASSED] = True
        return out

    def _take(self, memory: Iterable[Memory]) -> None:
        """Count what a kernel takes in its order, and free all but results when it has returned."""
        held: list[ExitStack] = []
        for one in memory:
            if isinstance(one, Tensor):
                self.count([one])
            elif isinstance(one, slice):
                for stack in held[one]:
                    stack.close()
                del held[one]
            else:
                held.append(self._hold(one))
        for stack in held:
            stack.close()

    def _hold(self, scratch: int | Reduction) -> ExitStack:
        """Count scratch until the stack is closed."""
        stack = ExitStack()
        if isinstance(scratch, int):
            stack.enter_context(self.held(scratch))
            return stack
        origins: tuple[Origin, ...] = ("staging", "semaphores")
        for origin, size in zip(origins, scratch_bytes(scratch, USUAL_PROCESSORS), strict=True):
            block = stack.enter_context(self.held(size, is_numbered=True))
            self._derived[block] = DerivedSize(origin, scratch.numbers())
        return stack

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Note what an operator tells about the step, before it runs."""
        self._operators += 1
        if self._most_operators is not None and self._operators > self._most_operators:
            raise TooLong(f"the step has more than {self._most_operators:,} operators")
        if func is aten.convolution.default:
            self._has_convolutions = True
        elif func is _OVERFLOW_CHECK:
            self._found_inf.add(args[1].untyped_storage()._cdata)
        elif func.name() in _COLLECTIVES:
            tensors = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
            self.label(_COLLECTIVES[func.name()], tensors)

    def _on_wrapper(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an operator on tensors that wrap others, such as those sharded over ranks."""
        if _is_in_place_foreach(func):
            return None
        if func not in _QUERIES and not self._aside:
            # Once unseen: the first call also makes fakes of the size of whole tensors, for their shapes.
            func(*args, **(kwargs or {}))
        return NotImplemented

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was resized without an operator: a gathered layer."""
        self._resizes, before = True, self._resizes
        try:
            super().resized(storage)
        finally:
            self._resizes = before

    def _value_of(self, tensor: Tensor) -> float | int | bool:
        """Return a value for ``.item()`` with which a step succeeds: no overflow, valid values, 1 of each."""
        if tensor.untyped_storage()._cdata in self._found_inf:
            return 0.0
        # Torch computes with single numbers of the user's code.
        value = value_of(tensor)
        if value is not None:
            with no_dispatch():
                return value.item()
        if tensor.dtype is torch.bool:
            return _PASSED in vars(tensor)
        # Neither 0 nor 1, because optimizers divide by a value and by its difference from 1.
        return 0.5 if tensor.is_floating_point() else 1

    def array_of(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Return the array that NumPy reads of a tensor, filled as `_value_of` does if values are unknown."""
        with no_dispatch():
            known = value_of(tensor)
            if known is None:
                self._has_reads = True
                value = self._value_of(tensor)
                known = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
            return known.numpy().copy()

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Count a tensor that an operator allocates unseen."""
        made: Tensor = super().__torch_dispatch__(aten.empty.memory_format, (), (shape,), _on_cpu(dtype))
        return made

    def _workspace(self, args: tuple[Any, ...]) -> Tensor:
        """Count the workspace of a recurrent layer."""
        parts = self._workspaces.parts_of(args)
        made = self._empty([whole_pages(parts)], torch.uint8)
        self._derived |= dict.fromkeys(self.blocks_of(made), DerivedSize("pages", parts))
        return made

    def _select_all(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
        """Return operator and arguments of a selection that keeps everything."""
        x = args[0]
        if func is aten.nonzero.default:
            self._has_selections = True
            return aten.empty.memory_format, ([x.numel(), x.dim()],), _on_cpu(torch.int64)
        if func is aten.masked_select.default:
            self._has_selections = True
            size = prod(map(max, zip_longest(x.shape[::-1], args[1].shape[::-1], fillvalue=1)))
            return aten.empty.memory_format, ([size],), _on_cpu(x.dtype)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in _MASKS:
                self._has_selections = True
                size = index.numel()
                for _ in range(index.dim()):
                    indices.append(self._empty([size], torch.int64))
            else:
                indices.append(index)
        return func, (x, indices, *args[2:]), kwargs

    def _label_new(self, block: int) -> None:
        kind = "activations" if self._phase in ("forward", "loss") else "temporaries"
        assert block == len(self._labels)
        if self._resizes:
            kind = GATHERED
        self._labels.append(Label(kind, self.modules[-1] if self.modules else ""))


def _is_in_place_foreach(func: Any) -> bool:
    """Check for an operator in place over hundreds of tensors, which allocates nothing and takes long."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _on_cpu(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "device": torch.device("cpu")}
