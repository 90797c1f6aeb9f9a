"""A simulated GPU: real CPU tensors in a model of CUDA's caching allocator, with the budget of that GPU.

Out-of-memory errors, recovery and fragmentation run without a GPU. The limit is always enforced, in training
as well. Operators are not simulated: kernels, autocast lists and workspaces are the CPU's, so a micro-batch
found here is not the GPU's (`autobatch.estimates` is for that).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import msgspec

from autobatch.core.records import DeviceRecord
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.allocator.caching import AllocatorConfig
from autobatch.device.allocator.ledger import Allocator, BudgetExceeded
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, Meter, resolve_budget
from autobatch.device.profiles import HardwareProfile


class SimulatedDevice(Device):
    """The GPU of a hardware profile, simulated on the CPU, without other processes.

    Args:
        profile: The GPU.
        memory_budget: Taken literally: a size, or a share of the GPU's memory. None for its memory less its
            CUDA context and a headroom.

    Raises:
        InputError: The budget is no size, or exceeds the memory of the GPU.
        DoesNotFitError: The GPU is smaller than its CUDA context and the headroom.
    """

    kind = "sim"
    allocator_config = AllocatorConfig()

    def __init__(self, profile: HardwareProfile, memory_budget: str | int | None = None) -> None:
        budget = resolve_budget(
            memory_budget,
            total_bytes=profile.total_bytes,
            available=[(profile.total_bytes, "in total"), (-profile.context_bytes, "CUDA context")],
            headroom_share=GPU_HEADROOM_SHARE,
            owner=profile.title,
        )
        super().__init__(
            budget,
            name=f"{profile.title} (simulated)",
            total_bytes=profile.total_bytes,
            notes=["simulated: CPU tensors in a model of CUDA's caching allocator, at the speed of this CPU"],
        )
        self._context_bytes = profile.context_bytes
        self._session: Allocator | None = None

    def describe(self) -> DeviceRecord:
        """Return name, total and budget of the GPU."""
        return msgspec.structs.replace(super().describe(), other_processes_bytes=0)

    def enforced(self) -> AbstractContextManager[Meter]:
        """Start with an empty cache, and raise ``torch.OutOfMemoryError`` over the budget in the block."""
        return self._tracked(record=True)

    def training(self) -> AbstractContextManager[Meter]:
        """Enforce the budget within the block, and record no events."""
        return self._tracked(record=False)

    def compiler_missing(self) -> str | None:
        """Return that nothing is compiled here: torch compiles no model under a dispatch mode."""
        return "torch compiles nothing while the memory of a simulated GPU is counted"

    def release(self) -> None:
        """Collect garbage that still holds tensors, and free what the running session has cached."""
        super().release()
        if self._session is not None:
            self._session.release()

    @contextmanager
    def _tracked(self, *, record: bool) -> Iterator[StorageTracker]:
        outer, self._session = self._session, self.new_allocator()
        tracker = StorageTracker(self._session, text=self._refusal, record=record)
        try:
            with tracker:
                yield tracker
        finally:
            self._session = outer

    def _refusal(self, error: BudgetExceeded) -> str:
        """Return the figures of CUDA's own message (``DeviceCachingAllocator::malloc``) for a refusal."""
        total_bytes, in_use = self._total_bytes, error.reserved + self._context_bytes
        allowed = f"{_cuda_size(error.limit)} allowed; " if error.limit < total_bytes else ""
        return (
            f"CUDA out of memory. Tried to allocate {_cuda_size(error.attempted)}. GPU 0 has a total"
            f" capacity of {_cuda_size(total_bytes)} of which {_cuda_size(max(0, total_bytes - in_use))} is"
            f" free. Including non-PyTorch memory, this process has {_cuda_size(in_use)} memory in use."
            f" {allowed}Of the allocated memory {_cuda_size(error.allocated)} is allocated by PyTorch, and"
            f" {_cuda_size(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
        )


def _cuda_size(size: int) -> str:
    """Format a size like CUDA's ``format_size``: two decimals, the next unit only above 1024."""
    if size <= KiB:
        return f"{size} bytes"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if size <= KiB * unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / GiB:.2f} GiB"
