"""Devices whose tensors are on the CPU: the CPU itself, and a GPU that is simulated on it.

A dispatch mode counts the tensors. The operator that exceeds the budget raises ``torch.OutOfMemoryError``, so
the process survives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from autobatch.core.errors import InputError
from autobatch.core.units import parse_budget
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, Meter, resolve_budget
from autobatch.device.host import HostMemory, cpu_name
from autobatch.device.profiles import HardwareProfile
from autobatch.device.tracker import StorageTracker

HEADROOM_SHARE = 0.1
"""Share of the memory that no budget takes by default: operators also use memory besides tensors."""


class CpuDevice(Device):
    """The CPU, with a budget of host memory for tensors. It is counted while a probe runs, not in training.

    Args:
        memory: Memory that it may use.
        memory_budget: Taken literally: a size, or a share of the total such as ``"80%"``. None for the
            available memory less a headroom.
        notes: For the description.

    Raises:
        InputError: The budget is no size, exceeds the total, or is needed because the system reports nothing.
        DoesNotFitError: No memory is left after the headroom.
    """

    kind = "cpu"

    def __init__(
        self, memory: HostMemory, memory_budget: str | int | None = None, *, notes: Sequence[str] = ()
    ) -> None:
        if memory.total_bytes is not None and memory.available_bytes is not None:
            budget = resolve_budget(
                memory_budget,
                total_bytes=memory.total_bytes,
                available=[(memory.available_bytes, f"available ({memory.source})")],
                headroom_share=HEADROOM_SHARE,
                owner="this machine",
            )
        elif memory_budget is None or "%" in str(memory_budget):
            raise InputError(
                f"{memory.source}, so set --memory-budget to the bytes that may be used, such as 6GiB "
                f"(found {memory_budget})"
            )
        else:
            budget = parse_budget(memory_budget, whole_bytes=0), f"as set: {memory_budget}"
        total_bytes = budget[0] if memory.total_bytes is None else memory.total_bytes
        super().__init__(budget, name=cpu_name(), total_bytes=total_bytes, notes=notes)

    def session(self, *, is_probe: bool) -> AbstractContextManager[Meter]:
        """Raise ``torch.OutOfMemoryError`` over the budget within a probe; count nothing in training."""
        return StorageTracker(Allocator(self.budget_bytes)) if is_probe else nullcontext(Meter())


class SimulatedDevice(Device):
    """The GPU of a hardware profile: CPU tensors in a model of CUDA's caching allocator, which is always on.

    Out-of-memory errors, recovery and fragmentation run without a GPU. Operators are not simulated: kernels,
    autocast lists and workspaces are the CPU's, so a micro-batch found here is not the GPU's
    (`autobatch.estimates` is for that).

    Args:
        profile: The GPU.
        memory_budget: Taken literally: a size, or a share of the GPU's memory. None for its memory less its
            CUDA context and a headroom.

    Raises:
        InputError: The budget is no size, or exceeds the memory of the GPU.
        DoesNotFitError: The GPU is smaller than its CUDA context and the headroom.
    """

    kind = "sim"
    compiler_missing = "torch compiles nothing while the memory of a simulated GPU is counted"
    new_allocator = CachingAllocator

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
        self._session: Allocator | None = None

    @contextmanager
    def session(self, *, is_probe: bool) -> Iterator[StorageTracker]:
        """Raise ``torch.OutOfMemoryError`` over the budget within the block."""
        outer, self._session = self._session, CachingAllocator(self.budget_bytes)
        try:
            with StorageTracker(self._session, name="CUDA", record=is_probe) as tracker:
                yield tracker
        finally:
            self._session = outer

    def release(self) -> None:
        """Collect garbage that still holds tensors, and free what the running session has cached."""
        super().release()
        if self._session is not None:
            self._session.release()
