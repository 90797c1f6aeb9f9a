"""The CPU as a device: its budget is host memory, counted by a dispatch mode while a probe runs.

The operator that exceeds the budget raises ``torch.OutOfMemoryError``, so the process survives. Training runs
at full speed, with nothing counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from autobatch.core.errors import InputError
from autobatch.core.records import DeviceRecord
from autobatch.core.units import format_bytes, parse_budget
from autobatch.device.allocator.ledger import BudgetExceeded, CountingAllocator, MemoryStats
from autobatch.device.allocator.trace import Trace
from autobatch.device.allocator.tracker import StorageMeter
from autobatch.device.base import Device, Meter, resolve_budget
from autobatch.device.host import HostMemory, cpu_name, host_memory

_NOTHING = nullcontext()
"""Entered for each micro-batch."""
HEADROOM_SHARE = 0.1
"""Share of the memory that no budget takes by default: operators also use memory besides tensors."""


class SilentMeter:
    """A meter for a session in which nothing is counted."""

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return _NOTHING

    def mark(self, phase: str) -> None:
        """Do nothing."""

    def stats(self) -> MemoryStats:
        """Return None for every figure."""
        return MemoryStats(None, None, None, None, None)

    def trace(self) -> Trace | None:
        """Return None: nothing was recorded."""
        return None


class CpuDevice(Device):
    """The CPU, with a budget of host memory for tensors.

    Args:
        memory_budget: Taken literally: a size, or a share of the total such as ``"80%"``. None for the
            available memory less a headroom.
        memory: Memory of the host. None to read it from the system.
        notes: For the description.

    Raises:
        InputError: The budget is no size, exceeds the total, or is needed because the system reports nothing.
        DoesNotFitError: No memory is left after the headroom.
    """

    kind = "cpu"

    def __init__(
        self,
        *,
        memory_budget: str | int | None = None,
        memory: HostMemory | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._memory = host_memory() if memory is None else memory
        super().__init__(*_budget(memory_budget, self._memory))
        self._notes = notes

    def new_allocator(self) -> CountingAllocator:
        """Return an empty allocator limited to the budget. Freed memory goes back to the C library."""
        return CountingAllocator(self._budget_bytes)

    def describe(self) -> DeviceRecord:
        """Return name, total and budget. Memory of other processes is missing from what is available."""
        total = self._memory.total_bytes
        return DeviceRecord(
            kind=self.kind,
            name=cpu_name(),
            total_bytes=self._budget_bytes if total is None else total,
            budget_bytes=self._budget_bytes,
            budget_source=self._budget_source,
            notes=list(self._notes),
        )

    @contextmanager
    def enforced(self) -> Iterator[Meter]:
        """Raise ``torch.OutOfMemoryError`` over the budget within the block."""
        with (
            StorageMeter(self.new_allocator(), text=refusal_text) as tracker,
            tracker.noticing_resizes(),
        ):
            yield tracker

    @contextmanager
    def training(self) -> Iterator[Meter]:
        """Count nothing within the block."""
        yield SilentMeter()


def refusal_text(error: BudgetExceeded) -> str:
    """Return the message of a refusal: the request, the live tensors and the budget."""
    return (
        f"CPU out of memory: {format_bytes(error.attempted)} requested, {format_bytes(error.free)} free: "
        f"tensors hold {format_bytes(error.allocated)} of the memory budget of {format_bytes(error.limit)}"
    )


def _budget(asked: str | int | None, memory: HostMemory) -> tuple[int, str]:
    total, available = memory.total_bytes, memory.available_bytes
    if total is None and "%" in str(asked):
        raise InputError(
            f"memory_budget={asked!r} is a share, but {memory.source}: write a size such as 6GiB"
        )
    if total is None and asked is not None:
        return parse_budget(asked, whole_bytes=0), f"as set: {asked}"
    if asked is None and (total is None or available is None):
        raise InputError(f"{memory.source}, so set --memory-budget to what may be used, such as 6GiB")
    assert total is not None
    return resolve_budget(
        asked,
        total_bytes=total,
        available=[(available or 0, f"available ({memory.source})")],
        headroom_share=HEADROOM_SHARE,
        owner="this machine",
    )
