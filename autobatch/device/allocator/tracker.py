"""Counts tensor storages through an allocator, and raises when it refuses.

`StorageMeter` is a dispatch mode: it sees every operator, forward and backward, in setup, checkpoint
recompute and optimizer. Views and in-place operators add nothing. It works on fake tensors just as well.

Known limitations: memory that never becomes a tensor storage (scratch space inside operators, NumPy arrays,
the interpreter) is not counted; a storage that Python code resizes is noticed at the next operator on it or
mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded, MemoryStats
from autobatch.device.allocator.output_size import output_bytes
from autobatch.device.allocator.storage_table import EMPTY, StorageTable
from autobatch.device.allocator.trace import Trace


class _Kind(Enum):
    """What an operator's outputs are."""

    VIEW = 0
    IN_PLACE = 1
    NEW = 2


_MADE_UNSEEN = "aten::lift_fresh"
"""An alias by its schema, of a storage that was made without any operator (``torch.tensor``)."""


class StorageTracker(TorchDispatchMode):
    """Counts storages, and enforces the allocator's limit on them.

    Args:
        allocator: what to spend.
        text: the message of the error for a refusal.
        record: keep the events, for `trace`.
        storage_device: the type of device whose storages count; that of fake tensors is ``meta``.
        on_new: told the number of each block that is taken.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        allocator: Allocator,
        *,
        text: Callable[[BudgetExceeded], str] = str,
        record: bool = True,
        storage_device: str = "cpu",
        on_new: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = StorageTable(
            allocator, text=text, storage_device=storage_device, record=record, on_new=on_new
        )
        self.allocator = allocator
        self._record = record
        self._foresees = allocator.limit is not None and storage_device == "cpu"
        self._kinds: dict[Any, _Kind] = {}
        self._marks: list[tuple[int, str]] = []
        self._aside = False

    def __exit__(self, *error: object) -> None:
        """Leave the mode; what is alive is watched no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._book.forget()

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made elsewhere; those that are counted already are left alone.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        for tensor in tensors:
            self._book.count(tensor)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, nothing is counted: for work that belongs to the host, such as making a batch."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def mark(self, phase: str) -> None:
        """Say what comes next; storages that were resized without any operator are put right.

        Raises:
            torch.OutOfMemoryError: one of them has outgrown the budget.
        """
        self._book.settle()
        self._book.check_all()
        self._marks.append((len(self._book.events), phase))

    def settle(self) -> None:
        """Count what an operator left undecided; see `_is_gradient_sum`."""
        self._book.settle()

    def trace(self) -> Trace | None:
        """The events so far; ``None`` if they are not recorded."""
        return Trace(tuple(self._book.events), tuple(self._marks)) if self._record else None

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of the block that a tensor lives in; ``None`` if it is not counted."""
        watch = self._book.watch_of(tensor)
        return None if watch is None or watch.block == EMPTY else watch.block

    @property
    def position(self) -> int:
        """The number of events so far."""
        return len(self._book.events)

    def transient(self, size: int) -> None:
        """Book memory that an operator used and gave back before it returned.

        Raises:
            torch.OutOfMemoryError: it did not fit.
        """
        self._book.transient(size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it made; see the class.

        Raises:
            torch.OutOfMemoryError: it did not fit, or is sure not to.
        """
        kwargs = {} if kwargs is None else kwargs
        if self._aside:
            return func(*args, **kwargs)
        self._book.settle()
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind is _Kind.VIEW:
            return func(*args, **kwargs)
        if kind is _Kind.NEW and self._foresees:
            self._foresee(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is torch.ops.aten.add.Tensor and self._is_gradient_sum(args, out):
            return out
        refusal = self._note(out, kind)
        if refusal is not None:
            # The error's traceback keeps this frame alive: let go of what did not fit first.
            del out
            raise torch.OutOfMemoryError(refusal)
        return out

    def _note(self, out: Any, kind: _Kind) -> str | None:
        """Count the outputs; a refusal comes as text, so that no frame of its traceback holds on to them."""
        note = self._book.count if kind is _Kind.NEW else self._book.check
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

    def _foresee(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operator whose outputs are sure not to fit before it touches the memory."""
        allocator = self.allocator
        room = (allocator.limit or 0) - allocator.allocated_bytes
        needed = output_bytes(func, args, kwargs, threshold=room)
        if needed > room:
            allocator.free(self._book.allocate(needed))

    def _is_gradient_sum(self, args: tuple[Any, ...], out: Any) -> bool:
        """Whether autograd adds two gradients here; the sum is then counted when the summand's fate is known.

        Under any dispatch mode autograd adds gradients out of place, without one in place
        (``isTensorSubclassLike`` in torch/csrc/autograd/functions/accumulate_grad.h and input_buffer.cpp).
        What counts is what happens without, so the sum takes over the block of the summand if that dies with
        the addition.
        """
        return (
            torch._C._current_graph_task_id() >= 0
            and not torch.is_grad_enabled()
            and isinstance(args[0], Tensor)
            and isinstance(out, Tensor)
            and out.layout is torch.strided
            and self._book.defer(args[0], out)
        )


def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name == _MADE_UNSEEN:
        return _Kind.NEW
    if any(each.alias_info is None for each in schema.returns):
        return _Kind.NEW
    if any(each.alias_info.is_write for each in schema.returns):
        return _Kind.IN_PLACE
    return _Kind.VIEW


class StorageMeter(StorageTracker):  # type: ignore[no-untyped-call]
    """A `autobatch.device.base.Meter` that counts storages, and enforces the allocator's limit on them."""

    def stats(self) -> MemoryStats:
        """Read the allocator."""
        allocator = self.allocator
        return MemoryStats(
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            retries=allocator.retries,
        )
