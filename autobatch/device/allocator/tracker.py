"""A dispatch mode that counts tensor storages in an allocator, and raises if that refuses.

It sees every operator, forward and backward, in setup, checkpoint recompute and optimizer. Views and in-place
operators add nothing. It works on fake tensors as well.

A storage is counted when it is first seen, and freed when it dies. Its Python object lives exactly as long as
the storage (PyObject preservation, c10/core/StorageImpl.h), so a weak reference shows its end. The idea is
from torch/distributed/_tools/mem_tracker.py.

Known limitations: memory that never becomes a tensor storage (scratch space of operators, NumPy arrays, the
interpreter) is not counted. A storage that an operator resizes through another name is noticed at the next
operator on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import zip_longest
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autobatch.device import private
from autobatch.device.allocator.ledger import Allocator, BudgetExceeded, MemoryStats
from autobatch.device.allocator.trace import FREE, Trace

aten = torch.ops.aten
EMPTY = -1
"""Number of the block of a storage without bytes."""


class _Kind(Enum):
    """Kinds of outputs of an operator."""

    VIEW = 0
    IN_PLACE = 1
    NEW = 2
    UPDATE = 3
    """In place, and never of another size."""
    SUM = 4
    """New, but autograd adds gradients in place."""


_VIEW, _NEW, _UPDATE, _SUM = _Kind.VIEW, _Kind.NEW, _Kind.UPDATE, _Kind.SUM
_STRIDED = torch.strided
UPDATES = frozenset(
    {
        aten.add_.Tensor,
        aten.add_.Scalar,
        aten.sub_.Tensor,
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.div_.Tensor,
        aten.lerp_.Scalar,
        aten.lerp_.Tensor,
        aten.addcmul_.default,
        aten.addcdiv_.default,
        aten.copy_.default,
        aten.zero_.default,
        aten.fill_.Scalar,
    }
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
_PRODUCTS = {id(aten.embedding.default), id(aten.repeat.default), id(aten.convolution.default)}
"""Operators whose result may have as many elements as the product of their arguments. They stand by their
identity, because their own hash takes longer than the rest of a look-up."""
_WIDEST_BYTES = 16
"""Bytes of the widest usual element of a result: a number with its index."""


class Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a counted storage, with its block and its handle in the allocator."""

    __slots__ = ("block", "handle", "key", "size")

    key: int
    size: int
    handle: Any
    block: int


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: those of its parts if it is sparse or wraps others."""
    flatten = None if type(tensor) is Tensor else getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a part of a DTensor is its mesh
                yield from _storages_of(part)
        return
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        for part in _parts(tensor):
            yield from _storages_of(part)
        return
    yield storage


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a tensor without a storage; none of an opaque tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


class StorageTracker(TorchDispatchMode):
    """A dispatch mode that counts storages, and enforces the allocator's limit on them: a meter.

    Args:
        allocator: Allocator that the storages are counted in.
        text: Returns the error message for a refusal.
        record: Whether to keep the events.
        storage_device: Type of the device whose storages count; ``meta`` for fake tensors.

    Every method that counts raises ``torch.OutOfMemoryError`` if the allocator refuses.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        allocator: Allocator,
        *,
        text: Callable[[BudgetExceeded], str] = str,
        record: bool = True,
        storage_device: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = allocator
        self.events: list[tuple[int, int]] = []
        self._text, self._record, self._storage_device = text, record, storage_device
        self._checks_first = allocator.limit is not None and storage_device == "cpu"
        self._kinds: dict[int, tuple[_Kind, Any]] = {}
        """Kinds by the identity of operators, whose own hash takes longer than the rest of a look-up."""
        self._live: dict[int, Watch] = {}
        """Counted storages by their identity."""
        self._blocks = 0
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
                self._recount_storage(storage)

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
        for tensor in tensors:
            self._count_tensor(tensor)

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
        return Trace(tuple(self.events), tuple(self._marks), tuple(self._modules))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count its outputs.

        Raises:
            torch.OutOfMemoryError: They did not fit, or are certain not to.
        """
        kwargs = {} if kwargs is None else kwargs
        if self._aside:
            return func(*args, **kwargs)
        if types and has_wrappers(types):
            return NotImplemented
        if self._undecided is not None:
            self.settle()
        known = self._kinds.get(id(func))
        if known is None:
            known = self._kinds[id(func)] = (_kind_of(func), func)
        kind = known[0]
        if kind is _VIEW or (kind is _UPDATE and args[0].layout is _STRIDED):
            return func(*args, **kwargs)
        # The sum of two gradients takes over the memory of one of them, so it may fit where no tensor does.
        is_sum = kind is _SUM and private.is_in_backward() and not torch.is_grad_enabled()
        if (kind is _NEW or kind is _SUM) and self._checks_first and not is_sum:
            self._refuse_early(func, args, kwargs)
        out = func(*args, **kwargs)
        if is_sum and self._defer(args[0], out):
            return out
        refusal = self._note(out, kind)
        if refusal is not None:
            # The error's traceback keeps this frame alive, so drop first what did not fit.
            del out
            raise torch.OutOfMemoryError(refusal)
        return out

    def _note(self, out: Any, kind: _Kind) -> str | None:
        """Count the outputs. Return a refusal as text, so that no frame of its traceback keeps them alive."""
        changes = kind is _Kind.IN_PLACE or kind is _UPDATE
        note = self._recount_tensor if changes else self._count_tensor
        try:
            if isinstance(out, Tensor):
                note(out)
            elif isinstance(out, list | tuple):
                for each in out:
                    if isinstance(each, Tensor):
                        note(each)
        except torch.OutOfMemoryError as error:
            return str(error)
        return None

    def _refuse_early(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operator whose outputs are certain not to fit, before it takes the memory."""
        room = (self.allocator.limit or 0) - self.allocator.allocated_bytes
        if _most_bytes(func, args) > room:
            needed = _output_bytes(func, args, kwargs)
            if needed > room:
                self.allocator.free(self._allocate(needed))

    def settle(self) -> None:
        """Count a sum of gradients whose summand is still alive, so that it takes over no block."""
        if self._undecided is not None:
            storage = self._undecided[1]()
            self._undecided = None
            if storage is not None:
                self._count_storage(storage)

    def _count_tensor(self, tensor: Tensor) -> None:
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            self._count_storage(tensor.untyped_storage())
            return
        for storage in _storages_of(tensor):
            self._count_storage(storage)

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is counted already with its size."""
        key = id(storage)
        known = self._live.get(key)
        size = storage.nbytes()
        if known is not None:
            if known.size != size:
                self._resize(known, size)
        elif storage.device.type == self._storage_device:
            handle = self._allocate(size)
            self._watch(storage, key, size, handle, self._new_block(size))

    def _recount_tensor(self, tensor: Tensor) -> None:
        """Count the new size of a counted storage that an operator resized in place.

        An operator that changes a sparse tensor in place gives it new parts, which are counted.
        """
        for part in _parts(tensor):
            self._count_tensor(part)
        if self._watch_of(tensor) is not None:
            self._recount_storage(tensor.untyped_storage())

    def _recount_storage(self, storage: torch.UntypedStorage) -> None:
        watch = self._live.get(id(storage))
        if watch is not None and watch.size != storage.nbytes():
            self._resize(watch, storage.nbytes())

    def _watch_of(self, tensor: Tensor) -> Watch | None:
        try:
            return self._live.get(id(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):
            return None

    def _allocate(self, size: int) -> Any:
        try:
            return self.allocator.malloc(size)
        except BudgetExceeded as error:
            text = self._text(error)
        # Raised here, the error has no context whose traceback would keep frames and tensors alive.
        raise torch.OutOfMemoryError(text)

    def _defer(self, summand: Any, out: Any) -> bool:
        """Return whether a sum of two gradients is counted later, when it is known what block it has.

        Autograd adds gradients in place, but out of place under any dispatch mode (``isTensorSubclassLike``
        in torch/csrc/autograd/functions/accumulate_grad.h and input_buffer.cpp). The count must be that
        without a mode, so the sum takes over the block of the summand if that dies before the next `settle`.
        """
        if not isinstance(summand, Tensor) or not isinstance(out, Tensor) or out.layout is not _STRIDED:
            return False
        watch = self._watch_of(summand)
        storage = out.untyped_storage()
        if watch is None or watch.size != storage.nbytes():
            return False
        self._undecided = (watch, weakref.ref(storage))
        return True

    def _take_over(self, summand: Watch) -> bool:
        """Give the block of a dead summand to the sum, if it is that of the sum which is undecided."""
        if self._undecided is None or self._undecided[0] is not summand:
            return False
        storage = self._undecided[1]()
        self._undecided = None
        if storage is None:
            return False
        self._watch(storage, id(storage), summand.size, summand.handle, summand.block)
        return True

    def _watch(self, storage: torch.UntypedStorage, key: int, size: int, handle: Any, block: int) -> None:
        watch = Watch(storage, self._on_death)
        watch.key, watch.size, watch.handle, watch.block = key, size, handle, block
        self._live[key] = watch

    def _new_block(self, size: int) -> int:
        """Number a block. An empty block takes no memory and gets no number, so numbers follow the events."""
        if not size:
            return EMPTY
        block = self._blocks
        self._blocks += 1
        if self._record:
            self.events.append((block, size))
        return block

    def _resize(self, watch: Watch, size: int) -> None:
        """Count a new size: like torch, take the new block before freeing the old one."""
        handle = self._allocate(size)
        block = self._new_block(size)
        self._give_back(watch)
        watch.handle, watch.size, watch.block = handle, size, block

    def _on_death(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(watch, Watch)
        if self._live.get(watch.key) is watch:
            del self._live[watch.key]
            if not self._take_over(watch):
                self._give_back(watch)

    def _give_back(self, watch: Watch) -> None:
        self.allocator.free(watch.handle)
        if self._record and watch.size:
            self.events.append((watch.block, FREE))


def has_wrappers(types: Any) -> bool:
    """Check for a tensor that wraps others and runs its operators on them, such as one sharded over ranks.

    A mode that then returns NotImplemented sees these operators, with what they allocate on the way.
    """
    return any(getattr(kind, "__tensor_flatten__", None) is not None for kind in types)


def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name == _MADE_UNSEEN:
        return _Kind.NEW
    if func in UPDATES:
        return _Kind.UPDATE
    if any(each.alias_info is None for each in schema.returns):
        return _Kind.SUM if func in _SUMS else _Kind.NEW
    if any(each.alias_info.is_write for each in schema.returns):
        return _Kind.IN_PLACE
    return _Kind.VIEW


def _most_bytes(func: Any, args: Sequence[Any]) -> int:
    """Return an upper bound of what nearly all operators produce: broadcast, joined or repeated arguments."""
    shapes: list[torch.Size] = []
    joined = numbers = 1
    for arg in args:
        if isinstance(arg, Tensor):
            shapes.append(arg.shape)
        elif isinstance(arg, list | tuple) and arg:
            if isinstance(arg[0], int):
                numbers = max(numbers, prod(arg))
            else:
                joined += sum(part.numel() for part in arg if isinstance(part, Tensor))
    if id(func) in _PRODUCTS:
        return prod(map(prod, shapes)) * numbers * _WIDEST_BYTES
    rows = zip_longest(*map(reversed, shapes), fillvalue=1)
    return max(prod(map(max, rows)), joined, numbers) * _WIDEST_BYTES


def _output_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of the new storages that an operator will make, from a run on the meta device.

    The result is 0 if they are unknown: the operator has no meta kernel, a tensor is sparse, or the outputs
    depend on the data.
    """
    try:
        copies = _on_meta(args), _on_meta(kwargs)
        with torch.no_grad():
            out = func(*copies[0], **copies[1])
        # Some operators return a view of an argument which their schema does not declare (_unsafe_view).
        given = _storages(copies)
        return sum(size for storage, size in _storages(out).items() if storage not in given)
    except Exception:
        # The real arguments raise the same error, or only the meta kernel is missing.
        return 0


def _on_meta(values: Any) -> Any:
    def fake_copy(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise NotImplementedError("the size of a sparse tensor depends on the data")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    moved = tree_map_only(Tensor, fake_copy, values)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), moved)


def _storages(tensors: Any) -> dict[int, int]:
    """Return the bytes of the storages of a tree of tensors."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return {id(storage): storage.nbytes() for storage in storages}
