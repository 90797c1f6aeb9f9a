"""A dispatch mode that counts tensor storages in an allocator, and raises if that refuses.

It sees every operator, forward and backward, in setup, checkpoint recompute and optimizer. Views and in-place
operators add nothing. It works on fake tensors as well.

A storage is counted when it is first seen, and freed when it dies. Its Python object lives exactly as long as
the storage (PyObject preservation, c10/core/StorageImpl.h), so a weak reference shows its end. The idea is
from torch/distributed/_tools/mem_tracker.py.

Known limitations: memory that never becomes a tensor storage (scratch space of operators, NumPy arrays, the
interpreter) is not counted, nor are the parts of compressed sparse tensors. A result is counted once it is
there, so an operator takes the memory of a result that is refused. A storage that an operator resizes through
another name is noticed at the next operator on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.device.allocator import Allocator, BudgetExceeded, MemoryStats
from autobatch.device.base import Meter
from autobatch.device.trace import FREE, Trace

aten = torch.ops.aten
UPDATES = frozenset(
    getattr(operator, overload)
    for operator in (
        *(aten.add_, aten.sub_, aten.mul_, aten.div_, aten.lerp_),
        *(aten.addcmul_, aten.addcdiv_, aten.copy_, aten.zero_, aten.fill_),
    )
    for overload in operator.overloads()  # type: ignore[no-untyped-call]
)
"""Operators that change the values of a tensor in place, and never its storage: most of an optimizer step."""
_SUMS = frozenset(
    {
        aten.add.Tensor,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.index_add.default,
        aten.index_put.default,
    }
)
"""Operators with which autograd adds to a gradient in place, and out of place under any mode."""
_MADE_UNSEEN = "aten::lift_fresh"
"""An alias by its schema, but of a storage that no operator made (``torch.tensor``)."""
_Kind = Literal["view", "changed", "new", "sum"]
"""Kind of the outputs of an operator. Sums are new, but autograd adds gradients in place."""


class Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a counted storage, with its block and its handle in the allocator."""

    __slots__ = ("block", "handle", "key", "size")

    key: int
    size: int
    handle: Any
    block: int


class StorageTracker(TorchDispatchMode, Meter):
    """A dispatch mode that counts storages, and enforces the allocator's limit on them.

    Every method that counts raises ``torch.OutOfMemoryError`` if the allocator refuses.

    Args:
        allocator: Takes and frees what is counted.
        name: Begins the message of an error: CPU or CUDA.
        record: Whether to keep the events.
        storage_device: Type of the device whose storages count; ``meta`` for fake tensors.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        allocator: Allocator,
        *,
        name: str = "CPU",
        record: bool = True,
        storage_device: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator
        self.events: list[tuple[int, int]] = []
        self._name, self._record, self._storage_device = name, record, storage_device
        self._kinds: dict[int, tuple[_Kind, Any]] = {}
        """Kinds by the identity of operators, whose own hash takes longer than the rest of a look-up."""
        self._live: dict[int, Watch] = {}
        """Counted storages by their identity."""
        self._blocks = 0
        self._streams = {torch.cpu.current_stream(): 0}
        """Numbers of streams, with which FSDP places its collectives, also on the CPU."""
        self._stream_of: list[int] = []
        """The stream of each allocation."""
        self._undecided: tuple[Watch, weakref.ref[torch.UntypedStorage]] | None = None
        """A summand and a sum of gradients that may take over its block; None if there is none."""
        self._marks: list[tuple[int, str]] = []
        self._modules: list[tuple[int, str]] = []
        self._aside = False

    def __enter__(self) -> Self:
        """Enter the mode, and count a storage at once when Python code resizes it.

        FSDP takes and frees the parameters that it gathers in this way, which no operator shows.
        """
        resize = self._resize_storage = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if not self._aside:
                _raise(self._refusal_of([storage], is_new=False))

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode, and stop watching live storages, whose callbacks make reference cycles."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize_storage  # type: ignore[method-assign]
        self._live.clear()
        self._undecided = None

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made elsewhere, unless they are counted already."""
        _raise(self._refusal_of(tensors, is_new=True))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing within the block: for work of the host, such as collating a batch."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def mark(self, phase: str) -> None:
        """Record that a phase begins."""
        super().mark(phase)
        self.settle()
        self._marks.append((len(self.events), phase))

    def enter_module(self, name: str) -> None:
        """Record that a module's forward pass runs from here on; empty for none."""
        self._modules.append((len(self.events), name))

    def stats(self) -> MemoryStats:
        """Read the allocator."""
        return self.allocator.stats()

    def trace(self) -> Trace | None:
        """Return the events so far; None if they are not recorded."""
        if not self._record:
            return None
        streams = tuple(self._stream_of) if len(self._streams) > 1 else ()
        recorded = Trace(tuple(self.events), tuple(self._marks), tuple(self._modules), streams=streams)
        return recorded.canonical()

    def settle(self) -> None:
        """Count a sum of gradients whose summand is still alive, so that it takes over no block."""
        if self._undecided is not None:
            storage = self._undecided[1]()
            self._undecided = None
            if storage is not None:
                _raise(self._refusal_of([storage], is_new=True))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count its outputs.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        if self._aside:
            return func(*args, **(kwargs or {}))
        if types and has_wrappers(types):
            return NotImplemented
        self.settle()
        out = func(*args, **(kwargs or {}))
        known = self._kinds.get(id(func))
        if known is None:
            known = self._kinds[id(func)] = (_kind_of(func), func)
        kind = known[0]
        if kind == "view" or (kind == "sum" and self._may_take_over(args[0], out)):
            return out
        tensors = out if isinstance(out, list | tuple) else (out,)
        refusal = self._refusal_of(tensors, is_new=kind != "changed")
        if refusal is not None:
            # The error's traceback keeps this frame alive, so drop first what did not fit.
            del out, tensors
            raise torch.OutOfMemoryError(refusal)
        return out

    def _may_take_over(self, summand: Tensor, out: Tensor) -> bool:
        """Return whether a sum of two gradients is counted later, when it is known what block it has.

        Autograd adds gradients in place, but out of place under any dispatch mode (``isTensorSubclassLike``
        in torch/csrc/autograd/functions/accumulate_grad.h and input_buffer.cpp). The count must be that
        without a mode, so the sum takes over the block of the summand if that dies before the next `settle`.
        """
        is_in_backward = torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()
        if not is_in_backward or out.layout is not torch.strided:
            return False
        storage = out.untyped_storage()
        watch = next((self._live.get(id(part)) for part in _storages_of(summand)), None)
        if watch is None or watch.size != storage.nbytes():
            return False
        self._undecided = (watch, weakref.ref(storage))
        return True

    def _refusal_of(self, values: Iterable[Any], *, is_new: bool) -> str | None:
        """Count tensors and storages. Return a refusal as text, whose frames keep none of them alive."""
        try:
            for value in values:
                if isinstance(value, Tensor):
                    # A sparse tensor that is changed gets new parts.
                    are_new = is_new or value.layout is not torch.strided
                    for storage in _storages_of(value):
                        self._count(storage, is_new=are_new)
                elif isinstance(value, torch.UntypedStorage):
                    self._count(value, is_new=is_new)
        except BudgetExceeded as error:
            return f"{self._name} out of memory. {error}"
        return None

    def _count(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        """Count a storage, or the new size of one that is counted; others only if they are new."""
        watch = self._live.get(id(storage))
        size = storage.nbytes()
        if watch is not None:
            if watch.size != size:
                # Like torch, take the new block before freeing the old one.
                handle, block = self._take(size)
                self._give_back(watch)
                watch.size, watch.handle, watch.block = size, handle, block
        elif is_new and storage.device.type == self._storage_device:
            self._watch(storage, size, *self._take(size))

    def _take(self, size: int) -> tuple[Any, int]:
        """Take a block and return its handle and its number, which an empty one does not have."""
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        handle = self.allocator.malloc(size, stream)
        block = self._blocks
        if size:
            self._blocks += 1
            if self._record:
                self.events.append((block, size))
                self._stream_of.append(stream)
        return handle, block

    def _give_back(self, watch: Watch) -> None:
        self.allocator.free(watch.handle)
        if self._record and watch.size:
            self.events.append((watch.block, FREE))

    def _watch(self, storage: torch.UntypedStorage, size: int, handle: Any, block: int) -> None:
        watch = Watch(storage, self._on_death)
        watch.key, watch.size, watch.handle, watch.block = id(storage), size, handle, block
        self._live[watch.key] = watch

    def _on_death(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(watch, Watch)
        if self._live.get(watch.key) is not watch:
            return
        del self._live[watch.key]
        if self._undecided is not None and self._undecided[0] is watch:
            total = self._undecided[1]()
            self._undecided = None
            if total is not None:
                self._watch(total, watch.size, watch.handle, watch.block)
                return
        self._give_back(watch)


def _raise(refusal: str | None) -> None:
    if refusal is not None:
        raise torch.OutOfMemoryError(refusal)


def has_wrappers(types: Any) -> bool:
    """Check for a tensor that wraps others and runs its operators on them, such as one sharded over ranks.

    A mode that then returns NotImplemented sees these operators, with what they allocate on the way.
    """
    return any(getattr(kind, "__tensor_flatten__", None) is not None for kind in types)


def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name == _MADE_UNSEEN:
        return "new"
    if any(each.alias_info is None for each in schema.returns):
        return "sum" if func in _SUMS else "new"
    return "changed" if any(each.alias_info.is_write for each in schema.returns) else "view"


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor: those of its parts if it is sparse or wraps others."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    parts: Iterable[Any] = ()
    if has_wrappers([type(tensor)]):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    elif tensor.layout is torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
    elif tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    # A part of a DTensor is its mesh.
    return [storage for part in parts if isinstance(part, Tensor) for storage in _storages_of(part)]
