"""Allocators of a budget of bytes: their figures, their refusal, and an allocator that only counts.

This module does not use torch. `autobatch.device.allocator.caching` models CUDA's caching allocator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from autobatch.core.units import format_bytes


class MemoryStats(NamedTuple):
    """Readings of an allocator, in bytes; None if the device has no such figure."""

    allocated_bytes: int | None = None
    """Held by live tensors."""
    reserved_bytes: int | None = None
    """Held by the allocator, cached blocks included."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    retries: int | None = None
    """Allocations that succeeded only after cached segments were freed."""


class Allocator(ABC):
    """An allocator of bytes from a budget, with the figures of `MemoryStats`."""

    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    @abstractmethod
    def malloc(self, size: int, stream: int = 0) -> Any:
        """Take ``size`` bytes on a stream and return a handle for `free`.

        Raises:
            BudgetExceeded: They do not fit. Live blocks are unchanged.
        """

    @abstractmethod
    def free(self, handle: Any) -> None:
        """Free a handle of `malloc`, once."""

    def release(self) -> None:  # noqa: B027 - not every allocator has a cache
        """Free cached memory."""

    def stats(self) -> MemoryStats:
        """Return the figures."""
        return MemoryStats(
            self.allocated_bytes,
            self.reserved_bytes,
            self.peak_allocated_bytes,
            self.peak_reserved_bytes,
        )


class BudgetExceeded(Exception):  # noqa: N818 - callers translate it; it is no fault
    """The refusal of a request, with the words and the figures of CUDA's own message.

    Args:
        attempted: Bytes that the allocator needed: those that were asked for, or a whole segment.
        allocator: The allocator that refused, as it is now.
    """

    def __init__(self, attempted: int, allocator: Allocator) -> None:
        limit, allocated, reserved = allocator.limit or 0, allocator.allocated_bytes, allocator.reserved_bytes
        held = allocated if reserved is None else reserved
        idle = f", and {format_bytes(held - allocated)} is reserved by PyTorch but unallocated"
        super().__init__(
            f"Tried to allocate {format_bytes(attempted)}. {format_bytes(limit)} allowed, of which "
            f"{format_bytes(limit - held)} is free; {format_bytes(allocated)} is allocated by PyTorch"
            + ("" if reserved is None else idle)
        )


class CountingAllocator(Allocator):
    """An allocator that counts live bytes against a limit, without rounding and without a cache."""

    def malloc(self, size: int, stream: int = 0) -> int:
        """Take ``size`` bytes; see `Allocator.malloc`."""
        allocated = self.allocated_bytes + size
        if self.limit is not None and allocated > self.limit:
            raise BudgetExceeded(size, self)
        self.allocated_bytes = allocated
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        return size

    def free(self, handle: int) -> None:
        """Free bytes."""
        self.allocated_bytes -= handle
