"""The mode that records a step on fake tensors: what a meter would see, labelled, and the answers of values.

What only values could tell is answered so that a step goes well and is no smaller than it could be: nothing
overflowed, and a selection by a mask keeps everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.onednn_workspace import Workspaces
from autobatch.device.allocator.trace import Trace, repetition
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.footprint.attention import backward_scratch_bytes

aten = torch.ops.aten


_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
"""Operators that run on cuBLAS, which takes a workspace at its first call in each thread."""


_DEVICE = torch.ops.prim.device.default
"""Asked more often than all other operators together, for autograd asks it of every fake."""


_QUESTIONS = frozenset({_DEVICE, aten._local_scalar_dense.default})


_RECURRENT = aten.mkldnn_rnn_layer.default


_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default


_REDUCED = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
"""Losses that put a value for every element into their result before they shrink it to one number, and the
place of the reduction among their arguments: the storage stays as it was (ATen/native/Loss.cpp), which their
meta kernels do not tell."""


_SELECTIONS = frozenset({aten.nonzero.default, aten.masked_select.default, aten.index.Tensor})
"""Operators whose results are as large as their data says."""


_MASKS = (torch.bool, torch.uint8)


class Label(NamedTuple):
    """What a block is for."""

    kind: str
    """``parameters``, ``averaged weights``, ``gradients``, ``optimizer state``, ``batch``, ``activations`` or
    ``temporaries``."""
    module: str
    """Name of the module whose forward made it; empty outside of any."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One traced step."""

    trace: Trace
    """Canonical: its blocks are numbered as they were taken."""
    labels: tuple[Label, ...]
    """By block number."""
    first_products: tuple[int, ...]
    """Indices of the events before which the first product ran: in the forward, and in the backward."""
    has_convolutions: bool
    keeps_everything: bool
    """Whether a selection by values was met, and taken to keep everything."""


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """A storage mode for fakes that answers what only values could tell."""

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__(CountingAllocator(), storage_device="meta", on_new=self._label_new)
        self._on_gpu = on_gpu
        self.modules: list[str] = []
        self._labels: list[Label] = []
        self._phase = "setup"
        self._first: dict[bool, int] = {}
        self._has_convolutions = False
        self._found_inf: set[int] = set()
        self._workspaces = Workspaces()
        self.keeps_everything = False
        """Whether a selection by values was met, and taken to keep everything."""
        self._again: Trace | None = None

    def place(self) -> tuple[int, int]:
        """The number of events and of marks so far."""
        return self.position, len(self._marks)

    def repeat(self, since: tuple[int, int]) -> bool:
        """Record once more all that came after a `place`, without running it.

        Returns:
            Whether it can be: in a steady state, what is alive here is what was alive there.
        """
        trace = self.trace()
        again = None if trace is None else repetition(trace, *since)
        if trace is None or again is None:
            return False
        self._again = trace.followed_by(again)
        self._labels += self._labels[len(self._labels) - again.blocks :]
        return True

    def recording(self) -> Recording:
        """What was recorded; call it outside of the mode."""
        # What is freed after a repetition is its end, which no peak depends on.
        trace = self._again or self.trace()
        assert trace is not None
        return Recording(
            trace=trace.canonical(),
            labels=tuple(self._labels),
            first_products=tuple(sorted(self._first.values())),
            has_convolutions=self._has_convolutions,
            keeps_everything=self.keeps_everything,
        )

    def mark(self, phase: str) -> None:
        """Say what comes next."""
        super().mark(phase)
        self._phase = phase

    def adopt_as(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made elsewhere, and say what they are for."""
        adopted = list(tensors)
        self.count(adopted)
        self.label(kind, adopted)

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what the blocks of tensors are for."""
        for tensor in tensors:
            block = self.block_of(tensor)
            if block is not None:
                self._labels[block] = self._labels[block]._replace(kind=kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on fakes; see the class."""
        if func in _QUESTIONS:
            return args[0].fake_device if func is _DEVICE else self._answer(args[0])
        if func.name().startswith("aten::_foreach_") and func._schema.name.endswith("_"):
            # In place over hundreds of tensors: nothing comes of it but time.
            return None
        if self._on_gpu and func is aten.lift_fresh.default:
            # ``torch.tensor(1.0)``: where no device is named, it stands on the host, also with a card.
            return func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self._first.setdefault(torch._C._current_graph_task_id() >= 0, self.position)
        elif func is aten.convolution.default:
            self._has_convolutions = True
        elif func is _CHECK:
            self._found_inf.add(args[1].untyped_storage()._cdata)
        elif func in _SELECTIONS:
            func, args, kwargs = self._keep_everything(func, args, kwargs)
        if func in _REDUCED and (args[_REDUCED[func]] if len(args) > _REDUCED[func] else 1):
            return self._one_of(args[0], args[1])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _RECURRENT:
            out = (*out[:3], self._empty([self._workspaces.bytes_of(args)], torch.uint8))
        scratch = backward_scratch_bytes(func, args)
        if self._on_gpu and scratch:
            self.transient(scratch)
        return out

    def _answer(self, tensor: Tensor) -> float | int | bool:
        """A value for ``.item()``: a step that goes well. Nothing overflowed, counts and losses are 1."""
        if tensor.untyped_storage()._cdata in self._found_inf:
            return 0.0
        if tensor.dtype is torch.bool:
            return False
        # Neither 0 nor 1: optimizers divide by a value, and by what is left to 1.
        return 0.5 if tensor.is_floating_point() else 1

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that an operator makes without telling torch."""
        made: Tensor = super().__torch_dispatch__(aten.empty.memory_format, (), (shape,), _typed(dtype))
        return made

    def _one_of(self, x: Tensor, y: Tensor) -> Tensor:
        """One number in a storage for as many as two tensors have elements together."""
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        dtype = torch.promote_types(x.dtype, y.dtype)
        one: Tensor = aten.as_strided.default(self._empty(shape, dtype), [], [])
        return one

    def _keep_everything(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
        """In place of a selection by values, one that selects everything: operator and arguments."""
        x = args[0]
        if func is aten.nonzero.default:
            self.keeps_everything = True
            return aten.empty.memory_format, ([x.numel(), x.dim()],), _typed(torch.int64)
        if func is aten.masked_select.default:
            self.keeps_everything = True
            size = prod(map(max, zip_longest(x.shape[::-1], args[1].shape[::-1], fillvalue=1)))
            return aten.empty.memory_format, ([size],), _typed(x.dtype)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in _MASKS:
                self.keeps_everything = True
                size = index.numel()
                for _ in range(index.dim()):
                    indices.append(self._empty([size], torch.int64))
            else:
                indices.append(index)
        return func, (x, indices, *args[2:]), kwargs

    def _label_new(self, block: int) -> None:
        kind = "activations" if self._phase in ("forward", "loss") else "temporaries"
        assert block == len(self._labels)
        self._labels.append(Label(kind, self.modules[-1] if self.modules else ""))


def _typed(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "device": torch.device("cpu")}
