"""A budget of bytes: the protocol of allocators, their refusal, and an allocator that only counts.

This module does not use torch. `autobatch.device.allocator.caching` models CUDA's caching allocator.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from autobatch.core.units import GiB, KiB, MiB


class BudgetExceeded(Exception):  # noqa: N818 - callers translate it; it is no fault
    """The refusal of a request by an allocator. All sizes are in bytes.

    Attributes:
        requested: Size of the request.
        attempted: Memory that the allocator needed for it: a whole segment, or ``requested``.
        allocated: Memory of live blocks.
        reserved: Memory of the allocator, cached blocks included. None if it caches nothing.
        limit: The budget.
        free: The part of the budget that is not held.
    """

    def __init__(
        self, *, requested: int, attempted: int, allocated: int, reserved: int | None, limit: int
    ) -> None:
        self.requested = requested
        self.attempted = attempted
        self.allocated = allocated
        self.reserved = reserved
        self.limit = limit
        self.free = limit - (allocated if reserved is None else reserved)
        super().__init__(f"{attempted} bytes do not fit in the {self.free} free of {limit}")


class Allocator(Protocol):
    """An allocator of bytes from a budget. A figure that does not exist is None."""

    @property
    def limit(self) -> int | None:
        """The budget; None for no limit."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live blocks."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes of live blocks so far."""

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes of the allocator, cached blocks included."""

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Most bytes of the allocator so far."""

    @property
    def retries(self) -> int | None:
        """Number of times that cached segments were freed to retry a request."""

    def malloc(self, size: int) -> Any:
        """Take ``size`` bytes and return a handle for `free`.

        Raises:
            BudgetExceeded: They do not fit. Live blocks are unchanged.
        """

    def free(self, handle: Any) -> None:
        """Free a handle of `malloc`, once."""

    def release(self) -> None:
        """Free cached memory."""

    def reset_peak(self) -> None:
        """Reset the peaks to what is held now."""


class CountingAllocator:
    """An allocator that counts live bytes against a limit, without rounding and without a cache."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.reserved_bytes: int | None = None
        self.peak_reserved_bytes: int | None = None
        self.retries: int | None = None

    def malloc(self, size: int) -> int:
        """Take ``size`` bytes.

        Raises:
            BudgetExceeded: They do not fit.
        """
        allocated = self.allocated_bytes + size
        if self.limit is not None and allocated > self.limit:
            raise BudgetExceeded(
                requested=size,
                attempted=size,
                allocated=self.allocated_bytes,
                reserved=None,
                limit=self.limit,
            )
        self.allocated_bytes = allocated
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        return size

    def free(self, handle: int) -> None:
        """Free bytes."""
        self.allocated_bytes -= handle

    def release(self) -> None:
        """Do nothing: nothing is cached."""

    def reset_peak(self) -> None:
        """Reset the peak to what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes


def cuda_oom_text(error: BudgetExceeded, *, total_bytes: int, context_bytes: int = 0) -> str:
    """Return the message of CUDA's own error (``DeviceCachingAllocator::malloc``) for a refusal.

    Args:
        error: The refusal of a `CachingAllocator`.
        total_bytes: Capacity of the GPU.
        context_bytes: Memory outside the allocator: the CUDA context and loaded kernels.
    """
    reserved = error.allocated if error.reserved is None else error.reserved
    in_use = reserved + context_bytes
    allowed = f"{_cuda_size(error.limit)} allowed; " if error.limit < total_bytes else ""
    return (
        f"CUDA out of memory. Tried to allocate {_cuda_size(error.attempted)}. GPU 0 has a total"
        f" capacity of {_cuda_size(total_bytes)} of which {_cuda_size(max(0, total_bytes - in_use))} is free."
        f" Including non-PyTorch memory, this process has {_cuda_size(in_use)} memory in use. {allowed}"
        f"Of the allocated memory {_cuda_size(error.allocated)} is allocated by PyTorch, and"
        f" {_cuda_size(reserved - error.allocated)} is reserved by PyTorch but unallocated."
        " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
        " to avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/"
        "stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _cuda_size(size: int) -> str:
    """Format a size like CUDA's ``format_size``: two decimals, the next unit only above 1024."""
    if size <= KiB:
        return f"{size} bytes"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if size <= KiB * unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / GiB:.2f} GiB"


class MemoryStats(NamedTuple):
    """Readings of an allocator, in bytes; None if the device has no such figure."""

    allocated_bytes: int | None
    """Held by live tensors."""
    reserved_bytes: int | None
    """Held by the allocator, cached blocks included."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    retries: int | None
    """Allocations that succeeded only after cached segments were freed."""
