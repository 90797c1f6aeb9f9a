"""The CPU as a device: its budget is host memory, counted by a dispatch mode while a probe runs.

The operator that exceeds the budget raises ``torch.OutOfMemoryError``, so the process survives. Training runs
at full speed, with nothing counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from autobatch.core.errors import InputError
from autobatch.core.units import format_bytes, parse_budget
from autobatch.device.allocator.ledger import BudgetExceeded
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.device.base import Device, Meter, SilentMeter, resolve_budget
from autobatch.device.host import HostMemory, cpu_name, host_memory

HEADROOM_SHARE = 0.1
"""Share of the memory that no budget takes by default: operators also use memory besides tensors."""


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
        memory = host_memory() if memory is None else memory
        budget = _budget(memory_budget, memory)
        total_bytes = budget[0] if memory.total_bytes is None else memory.total_bytes
        super().__init__(budget, name=cpu_name(), total_bytes=total_bytes, notes=notes)

    @contextmanager
    def enforced(self) -> Iterator[Meter]:
        """Raise ``torch.OutOfMemoryError`` over the budget within the block."""
        with StorageTracker(self.new_allocator(), text=_refusal) as tracker:
            yield tracker

    def training(self) -> AbstractContextManager[Meter]:
        """Count nothing within the block."""
        return nullcontext(SilentMeter())


def _refusal(error: BudgetExceeded) -> str:
    return (
        f"CPU out of memory: {format_bytes(error.attempted)} requested, {format_bytes(error.free)} free: "
        f"tensors hold {format_bytes(error.allocated)} of the memory budget of {format_bytes(error.limit)}"
    )


def _budget(asked: str | int | None, memory: HostMemory) -> tuple[int, str]:
    total, available = memory.total_bytes, memory.available_bytes
    if asked is None and (total is None or available is None):
        raise InputError(f"{memory.source}, so set --memory-budget to what may be used, such as 6GiB")
    if total is not None:
        return resolve_budget(
            asked,
            total_bytes=total,
            available=[(available or 0, f"available ({memory.source})")],
            headroom_share=HEADROOM_SHARE,
            owner="this machine",
        )
    if "%" in str(asked):
        raise InputError(
            f"memory_budget={asked!r} is a share, but {memory.source}: write a size such as 6GiB"
        )
    assert asked is not None
    return parse_budget(asked, whole_bytes=0), f"as set: {asked}"
