"""Records of the device and of the processes that hold its memory."""

from __future__ import annotations

from autobatch.core.records.base import Record


class MemoryHolder(Record, frozen=True, kw_only=True):
    """Process that holds memory of the device."""

    pid: int | None
    """Process id as the driver sees it (the host's, in a container); None if unknown."""
    name: str | None
    used_bytes: int | None


class DeviceRecord(Record, frozen=True, kw_only=True):
    """The device and its memory budget."""

    kind: str
    """``cuda``, ``cpu`` or ``sim``."""
    name: str
    total_bytes: int
    budget_bytes: int
    """Bytes the allocator may hold."""
    budget_source: str
    """Origin of the budget, in words."""
    other_processes_bytes: int | None = None
    holders: list[MemoryHolder] = []
    notes: list[str] = []
    """Remarks on these figures, one per line."""
