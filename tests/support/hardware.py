"""Made-up hardware: profiles, and a CPU in place of a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autobatch.core.records import DeviceRecord
from autobatch.core.units import GiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.cpu import CpuDevice
from autobatch.device.profiles import Figure, HardwareProfile, load_profile


def a_figure(value: int) -> Figure:
    """Return a figure in bytes."""
    return Figure(value=value, unit="B", source="a test", date="2026-11-21", measured=True)


def a_profile(**changes) -> HardwareProfile:
    """Return a profile with 8 GiB and little else."""
    fields = {"schema": 1, "name": "my-gpu", "title": "My GPU", "vendor": "Acme", "capability": "8.6"}
    return HardwareProfile(**(fields | {"total": a_figure(8 * GiB)} | changes))


class CpuAsGpu(CpuDevice):
    """The memory of this machine in place of an L4's."""

    kind = "cuda"
    compute_capability = (8, 9)
    allocator_config = AllocatorConfig()

    def describe(self) -> DeviceRecord:
        total_bytes = load_profile("l4", user_dir=Path("nowhere")).total_bytes
        return msgspec.structs.replace(
            super().describe(), kind="cuda", name="NVIDIA L4", total_bytes=total_bytes
        )

    def new_allocator(self) -> CachingAllocator:
        return CachingAllocator(self.budget_bytes)
