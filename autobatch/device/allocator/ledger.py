"""Allocators of a budget of bytes: their figures, their refusal, and an allocator that only counts.

This module does not use torch. `autobatch.device.allocator.caching` models CUDA's caching allocator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple


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
    """An allocator of bytes from a budget, with the figures of `MemoryStats`.

    Args:
        limit: The budget; None for no limit.
    """

    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    retries: int | None = None

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    @abstractmethod
    def malloc(self, size: int) -> Any:
        """Take ``size`` bytes and return a handle for `free`.

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
            self.retries,
        )

    def refusal(self, requested: int, attempted: int) -> BudgetExceeded:
        """Return the refusal of a request, for which the allocator needed as much as was attempted."""
        return BudgetExceeded(
            requested=requested,
            attempted=attempted,
            allocated=self.allocated_bytes,
            reserved=self.reserved_bytes,
            limit=self.limit or 0,
        )


class BudgetExceeded(Exception):  # noqa: N818 - callers translate it; it is no fault
    """The refusal of a request. All sizes are in bytes.

    Args:
        requested: Size of the request.
        attempted: Memory that the allocator needed for it: a whole segment, or ``requested``.
        allocated: Memory of live blocks.
        reserved: Memory of the allocator, cached blocks included. None if it caches nothing.
        limit: The budget.
    """

    def __init__(
        self, *, requested: int, attempted: int, allocated: int, reserved: int | None, limit: int
    ) -> None:
        self.requested, self.attempted, self.limit = requested, attempted, limit
        self.allocated = allocated
        self.reserved = allocated if reserved is None else reserved
        self.free = limit - self.reserved
        super().__init__(f"{attempted} bytes do not fit in the {self.free} free of {limit}")


class CountingAllocator(Allocator):
    """An allocator that counts live bytes against a limit, without rounding and without a cache."""

    def malloc(self, size: int) -> int:
        """Take ``size`` bytes; see `Allocator.malloc`."""
        allocated = self.allocated_bytes + size
        if self.limit is not None and allocated > self.limit:
            raise self.refusal(size, size)
        self.allocated_bytes = allocated
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        return size

    def free(self, handle: int) -> None:
        """Free bytes."""
        self.allocated_bytes -= handle
