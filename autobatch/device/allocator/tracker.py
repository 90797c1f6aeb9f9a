"""A dispatch mode that counts tensor storages in an allocator, and raises if that refuses.

It sees every operator, forward and backward, in setup, checkpoint recompute and optimizer. Views and in-place
operators add nothing. It works on fake tensors as well.

Known limitations: memory that never becomes a tensor storage (scratch space of operators, NumPy arrays, the
interpreter) is not counted. A storage that Python code resizes is noticed at the next operator on it, or at
the next mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded, MemoryStats
from autobatch.device.allocator.output_size import output_bytes
from autobatch.device.allocator.storage_table import StorageTable
from autobatch.device.allocator.trace import Trace


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
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("add_", "Tensor"),
        ("add_", "Scalar"),
        ("sub_", "Tensor"),
        ("mul_", "Tensor"),
        ("mul_", "Scalar"),
        ("div_", "Tensor"),
        ("lerp_", "Scalar"),
        ("lerp_", "Tensor"),
        ("addcmul_", "default"),
        ("addcdiv_", "default"),
        ("copy_", "default"),
        ("zero_", "default"),
        ("fill_", "Scalar"),
    )
)
"""Operators that change the values of a tensor in place, and never its storage: most of an optimizer step."""
_SUMS = frozenset(
    {
        ("aten::add", "Tensor"),
        ("aten::scatter", "src"),
        ("aten::scatter", "value"),
        ("aten::scatter_add", ""),
        ("aten::index_add", ""),
        ("aten::index_put", ""),
    }
)
"""Operators with which autograd adds to a gradient in place, and out of place under any mode."""
_MADE_UNSEEN = "aten::lift_fresh"
"""An alias by its schema, but of a storage that no operator made (``torch.tensor``)."""


def _skip_frames(function: Callable[..., Any]) -> bool:
    """Keep ``torch.compile`` from compiling a function and what it calls; False if torch has no such rule."""
    try:
        frames = torch._C._dynamo.eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):  # private to torch
        return False
    return True


class StorageTracker(TorchDispatchMode):
    """A dispatch mode that counts storages, and enforces the allocator's limit on them.

    Args:
        allocator: Allocator that the storages are counted in.
        text: Returns the error message for a refusal.
        record: Whether to keep the events for `trace`.
        storage_device: Type of the device whose storages count; ``meta`` for fake tensors, None for all.
        on_new: Called with the number of each block that is taken.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch must wrap the mode to leave it uncompiled, which takes 1 µs an operator.

        If a compiled model runs under a mode, torch does not compile the model, and would compile the mode.
        """
        return not _skip_frames(cls.__torch_dispatch__)

    def __init__(
        self,
        allocator: Allocator,
        *,
        text: Callable[[BudgetExceeded], str] = str,
        record: bool = True,
        storage_device: str | None = "cpu",
        on_new: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = StorageTable(
            allocator, text=text, storage_device=storage_device, record=record, on_new=on_new
        )
        self.allocator = allocator
        self._record = record
        self._checks_first = allocator.limit is not None and storage_device == "cpu"
        self._kinds: dict[int, tuple[_Kind, Any]] = {}
        """Kinds by the identity of operators, whose own hash takes longer than the rest of a look-up."""
        self._marks: list[tuple[int, str]] = []
        self._aside = False

    def __exit__(self, *error: object) -> None:
        """Leave the mode, and stop watching live storages."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._book.forget()

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made elsewhere, unless they are counted already.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        for tensor in tensors:
            self._book.count(tensor)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing within the block: for work of the host, such as collating a batch."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def mark(self, phase: str) -> None:
        """Record that a phase begins, and count storages that were resized without any operator.

        Raises:
            torch.OutOfMemoryError: One of them no longer fits.
        """
        self._book.settle()
        self._book.check_all()
        self._marks.append((len(self._book.events), phase))

    def settle(self) -> None:
        """Count the output that the last operator left undecided; see `_takes_over`."""
        self._book.settle()

    def trace(self) -> Trace | None:
        """Return the events so far; None if they are not recorded."""
        return Trace(tuple(self._book.events), tuple(self._marks)) if self._record else None

    def blocks_of(self, tensor: Tensor) -> Iterator[int]:
        """Yield the numbers of the blocks that a tensor holds; none if it is not counted."""
        yield from self._book.blocks_of(tensor)

    @contextmanager
    def noticing_resizes(self) -> Iterator[None]:
        """Count a storage at once when Python code resizes it within the block.

        FSDP takes and frees the parameters that it gathers in this way, which no operator shows.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self.resized(storage)

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was resized without an operator.

        Raises:
            torch.OutOfMemoryError: It no longer fits.
        """
        if not self._aside:
            self._book.check_storage(storage)

    @property
    def position(self) -> int:
        """Number of events so far."""
        return len(self._book.events)

    def held(self, size: int, *, is_numbered: bool = False) -> AbstractContextManager[int]:
        """Count memory that an operator holds within the block, and return its number.

        Args:
            size: In bytes.
            is_numbered: Whether it has a number although it is empty.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        return self._book.held(size, is_numbered=is_numbered)

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
        if self._book.undecided is not None:
            self._book.settle()
        known = self._kinds.get(id(func))
        if known is None:
            known = self._kinds[id(func)] = (_kind_of(func), func)
        kind = known[0]
        if kind is _VIEW or (kind is _UPDATE and args[0].layout is _STRIDED):
            return func(*args, **kwargs)
        # The sum of two gradients takes over the memory of one of them, so it may fit where no tensor does.
        is_sum = kind is _SUM and torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()
        if (kind is _NEW or kind is _SUM) and self._checks_first and not is_sum:
            self._refuse_early(func, args, kwargs)
        out = func(*args, **kwargs)
        if is_sum and self._takes_over(args, out):
            return out
        refusal = self._note(out, kind)
        if refusal is not None:
            # The error's traceback keeps this frame alive, so drop first what did not fit.
            del out
            raise torch.OutOfMemoryError(refusal)
        return out

    def _note(self, out: Any, kind: _Kind) -> str | None:
        """Count the outputs. Return a refusal as text, so that no frame of its traceback keeps them alive."""
        note = self._book.check if kind is _Kind.IN_PLACE or kind is _UPDATE else self._book.count
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
        allocator = self.allocator
        room = (allocator.limit or 0) - allocator.allocated_bytes
        needed = output_bytes(func, args, kwargs, threshold=room)
        if needed > room:
            allocator.free(self._book.allocate(needed))

    def _takes_over(self, args: tuple[Any, ...], out: Any) -> bool:
        """Return whether a sum of two gradients is counted later.

        Autograd adds gradients in place, but out of place under any dispatch mode (``isTensorSubclassLike``
        in torch/csrc/autograd/functions/accumulate_grad.h and input_buffer.cpp). The count must be that
        without a mode, so the sum takes over the block of the summand if that dies with the addition.
        """
        return (
            isinstance(args[0], Tensor)
            and isinstance(out, Tensor)
            and out.layout is torch.strided
            and self._book.defer(args[0], out)
        )


def has_wrappers(types: Any) -> bool:
    """Check for a tensor that wraps others and runs its operators on them, such as one sharded over ranks.

    A mode that then returns NotImplemented sees these operators, with what they allocate on the way.
    """
    return any(getattr(one, "__tensor_flatten__", None) is not None for one in types)


def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name == _MADE_UNSEEN:
        return _Kind.NEW
    if func in UPDATES:
        return _Kind.UPDATE
    if any(each.alias_info is None for each in schema.returns):
        return _Kind.SUM if (schema.name, schema.overload_name) in _SUMS else _Kind.NEW
    if any(each.alias_info.is_write for each in schema.returns):
        return _Kind.IN_PLACE
    return _Kind.VIEW


class StorageMeter(StorageTracker):  # type: ignore[no-untyped-call]
    """A `autobatch.device.base.Meter` that counts storages and enforces the allocator's limit on them."""

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
