"""The table of live storages, with the memory that the allocator gave them.

A storage is counted when it is first seen, and freed when it dies. Its Python object lives exactly as long as
the storage (PyObject preservation, c10/core/StorageImpl.h), so a weak reference shows its end. The idea is
from torch/distributed/_tools/mem_tracker.py. Storages of fake tensors work in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded
from autobatch.device.allocator.trace import FREE

EMPTY = -1
"""Number of the block of a storage without bytes."""


class Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a counted storage, with its block and its handle in the allocator."""

    __slots__ = ("block", "handle", "key", "size")

    key: int
    size: int
    handle: Any
    block: int


class StorageTable:
    """Live storages by address, and the events so far.

    Args:
        allocator: Allocator that the storages are counted in.
        text: Returns the error message for a refusal.
        storage_device: Type of the device whose storages count; ``meta`` for fake tensors, None for all.
        record: Whether to keep the events.
        on_new: Called with the number of each block that is taken.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        text: Callable[[BudgetExceeded], str],
        storage_device: str | None,
        record: bool,
        on_new: Callable[[int], None] | None,
    ) -> None:
        self.allocator = allocator
        self.events: list[tuple[int, int]] = []
        self._text = text
        self._storage_device = storage_device
        self._record = record
        self._on_new = on_new
        self._live: dict[int, Watch] = {}
        self._blocks = 0
        self.undecided: tuple[Watch, weakref.ref[torch.UntypedStorage]] | None = None
        """A summand and a sum of gradients that may take over its block; None if there is none."""

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is counted already with its size.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            self.count_storage(tensor.untyped_storage())
            return
        for storage in storages_of(tensor):
            self.count_storage(storage)

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is counted already with its size.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        key = storage._cdata
        known = self._live.get(key)
        size = storage.nbytes()
        if known is not None:
            if known.size != size:
                self._resize(known, size)
        elif self._storage_device is None or storage.device.type == self._storage_device:
            handle = self.allocate(size)
            self._watch(storage, key, size, handle, self._new_block(size))

    def check(self, tensor: Tensor) -> None:
        """Count the new size of a counted storage that was resized, and leave other storages out.

        An operator that changes a sparse tensor in place gives it new parts, which are counted.

        Raises:
            torch.OutOfMemoryError: It no longer fits.
        """
        for part in _parts(tensor):
            self.count(part)
        watch = self.watch_of(tensor)
        if watch is not None:
            size = tensor.untyped_storage().nbytes()
            if watch.size != size:
                self._resize(watch, size)

    def check_all(self) -> None:
        """Do the same as `check` for every storage: Python code can resize without any operator.

        Raises:
            torch.OutOfMemoryError: One no longer fits.
        """
        for watch in list(self._live.values()):
            storage = watch()
            if storage is not None and storage.nbytes() != watch.size:
                self._resize(watch, storage.nbytes())

    def check_storage(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a counted storage that was resized, and leave other storages out.

        Raises:
            torch.OutOfMemoryError: It no longer fits.
        """
        watch = self._live.get(storage._cdata)
        if watch is not None and watch.size != storage.nbytes():
            self._resize(watch, storage.nbytes())

    def blocks_of(self, tensor: Tensor) -> Iterator[int]:
        """Yield the numbers of the blocks that a tensor holds; several for one that wraps others."""
        for storage in storages_of(tensor):
            watch = self._live.get(storage._cdata)
            if watch is not None and watch.block != EMPTY:
                yield watch.block

    def watch_of(self, tensor: Tensor) -> Watch | None:
        """Return the entry of a tensor's storage; None if it is not counted."""
        try:
            return self._live.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def allocate(self, size: int) -> Any:
        """Take bytes of the budget, and return their handle.

        Raises:
            torch.OutOfMemoryError: The allocator refuses.
        """
        try:
            return self.allocator.malloc(size)
        except BudgetExceeded as error:
            text = self._text(error)
        # Raised here, the error has no context whose traceback would keep frames and tensors alive.
        raise torch.OutOfMemoryError(text)

    @contextmanager
    def held(self, size: int, *, is_numbered: bool = False) -> Iterator[int]:
        """Hold memory within the block, and return its number.

        Args:
            size: In bytes.
            is_numbered: Whether it has a number although it is empty: its size may differ elsewhere.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        handle = self.allocate(size)
        block = self._new_block(size, is_numbered=is_numbered)
        try:
            yield block
        finally:
            self.allocator.free(handle)
            if self._record and block != EMPTY:
                self.events.append((block, FREE))

    def forget(self) -> None:
        """Drop all entries, which also breaks the reference cycle through the callbacks."""
        self._live.clear()
        self.undecided = None

    # A sum of gradients (see the tracker) is counted once it is known whether it takes over a block.

    def defer(self, summand: Tensor, out: Tensor) -> bool:
        """Let ``out`` take over the block of ``summand`` if that dies before the next `settle`."""
        watch = self.watch_of(summand)
        storage = out.untyped_storage()
        if watch is None or watch.size != storage.nbytes():
            return False
        self.undecided = (watch, weakref.ref(storage))
        return True

    def settle(self) -> None:
        """Count a deferred output whose summand is still alive.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        if self.undecided is not None:
            storage = self.undecided[1]()
            self.undecided = None
            if storage is not None:
                self.count_storage(storage)

    def _take_over(self) -> bool:
        assert self.undecided is not None
        summand, reference = self.undecided
        self.undecided = None
        storage = reference()
        if storage is None:
            return False
        self._watch(storage, storage._cdata, summand.size, summand.handle, summand.block)
        return True

    def _watch(self, storage: torch.UntypedStorage, key: int, size: int, handle: Any, block: int) -> None:
        watch = Watch(storage, self._on_death)
        watch.key, watch.size, watch.handle, watch.block = key, size, handle, block
        self._live[key] = watch

    def _new_block(self, size: int, *, is_numbered: bool = False) -> int:
        """Number a block. An empty block takes no memory and gets no number, so numbers follow the events."""
        if not size and not is_numbered:
            return EMPTY
        block = self._blocks
        self._blocks += 1
        if self._record:
            self.events.append((block, size))
        if self._on_new is not None:
            self._on_new(block)
        return block

    def _resize(self, watch: Watch, size: int) -> None:
        """Count a new size: like torch, take the new block before freeing the old one."""
        handle = self.allocate(size)
        block = self._new_block(size)
        self._give_back(watch)
        watch.handle, watch.size, watch.block = handle, size, block

    def _on_death(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(watch, Watch)
        if self._live.get(watch.key) is not watch:
            return
        del self._live[watch.key]
        if self.undecided is not None and self.undecided[0] is watch and self._take_over():
            return
        self._give_back(watch)

    def _give_back(self, watch: Watch) -> None:
        self.allocator.free(watch.handle)
        if self._record and watch.size:
            self.events.append((watch.block, FREE))


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: those of its parts if it is sparse or wraps others."""
    flatten = None if type(tensor) is Tensor else getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a part of a DTensor is its mesh
                yield from storages_of(part)
        return
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        for part in _parts(tensor):
            yield from storages_of(part)
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
