"""A budget of bytes: the protocol of allocators, their refusal, and the plain ledger.

Nothing here knows torch. `autobatch.device.allocator.caching` models CUDA's caching allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from autobatch.core.units import GiB, KiB, MiB

if TYPE_CHECKING:
    pass


class BudgetExceeded(Exception):  # noqa: N818 - an event that callers translate, not a fault
    """An allocator refused a request; all sizes in bytes.

    Attributes:
        requested: what was asked for.
        attempted: what the allocator wanted in turn: a whole segment, or ``requested``.
        allocated: held by live blocks.
        reserved: held by the allocator, cached blocks included; ``None`` where nothing is cached.
        limit: the budget.
        free: how much of the budget is not held.
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
    """Hands out bytes of a budget. Sizes in bytes; ``None`` where a figure does not exist."""

    @property
    def limit(self) -> int | None:
        """The budget; ``None``: unlimited."""

    @property
    def allocated_bytes(self) -> int:
        """Held by live blocks."""

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was held by live blocks."""

    @property
    def reserved_bytes(self) -> int | None:
        """Held by the allocator, cached blocks included."""

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most that was held by the allocator."""

    @property
    def retries(self) -> int | None:
        """How often cached segments were given back before a request was tried again."""

    def malloc(self, size: int) -> Any:
        """Take ``size`` bytes; the answer is what `free` wants.

        Raises:
            BudgetExceeded: they do not fit. Live blocks are as they were.
        """

    def free(self, handle: Any) -> None:
        """Give back what `malloc` answered, once."""

    def release(self) -> None:
        """Give back what is cached."""

    def reset_peak(self) -> None:
        """Start the peaks anew from what is held now."""


class CountingAllocator:
    """Counts live bytes against a limit: no rounding, no cache."""

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
            BudgetExceeded: they do not fit.
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
        """Give bytes back."""
        self.allocated_bytes -= handle

    def release(self) -> None:
        """Do nothing: nothing is cached."""

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes


def cuda_oom_text(
    error: BudgetExceeded, *, total_bytes: int, context_bytes: int = 0, device_index: int = 0
) -> str:
    """Render the message of CUDA's own error (``DeviceCachingAllocator::malloc``) for a refusal.

    Args:
        error: the refusal of a `CachingAllocator`.
        total_bytes: capacity of the card.
        context_bytes: held outside of the allocator: the CUDA context and loaded kernels.
        device_index: the number behind "GPU" in the text.
    """
    reserved = error.allocated if error.reserved is None else error.reserved
    in_use = reserved + context_bytes
    allowed = f"{_cuda_size(error.limit)} allowed; " if error.limit < total_bytes else ""
    return (
        f"CUDA out of memory. Tried to allocate {_cuda_size(error.attempted)}. GPU {device_index} has a total"
        f" capacity of {_cuda_size(total_bytes)} of which {_cuda_size(max(0, total_bytes - in_use))} is free."
        f" Including non-PyTorch memory, this process has {_cuda_size(in_use)} memory in use. {allowed}"
        f"Of the allocated memory {_cuda_size(error.allocated)} is allocated by PyTorch, and"
        f" {_cuda_size(reserved - error.allocated)} is reserved by PyTorch but unallocated."
        " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
        " to avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/"
        "stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _cuda_size(size: int) -> str:
    """Write a size as CUDA's ``format_size`` does: two decimals, the next unit only above 1024."""
    if size <= KiB:
        return f"{size} bytes"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if size <= KiB * unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / GiB:.2f} GiB"


class MemoryStats(NamedTuple):
    """Readings of the allocator, in bytes; ``None`` where the device cannot give the figure."""

    allocated_bytes: int | None
    """Held by live tensors now."""
    reserved_bytes: int | None
    """Held by the allocator now, cached blocks included."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    retries: int | None
    """Allocations that succeeded only after cached segments were given back."""
