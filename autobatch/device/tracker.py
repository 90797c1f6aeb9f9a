"""The meter of tensors on the CPU: counted by a dispatch mode, read from their allocator."""

from __future__ import annotations

from autobatch.device.base import MemoryStats
from autobatch.footprint.watching import StorageMode


class StorageTracker(StorageMode):  # type: ignore[no-untyped-call]
    """A `autobatch.device.base.Meter` that counts storages, and enforces the allocator's limit on them."""

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
