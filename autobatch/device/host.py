"""The machine: the memory that this process may use, and its processor.

Memory is the lower of the machine's and its control groups' figures.

Control groups: docs.kernel.org/admin-guide/cgroup-v2.html (``memory.max``, ``memory.current``). Their usage
includes the page cache, of which the kernel can reclaim ``inactive_file``: that part counts as available.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

_GPU_DRIVERS = ("nvidiactl", "nvmap", "kfd", "dxg")
"""Device files of the drivers of NVIDIA, of Tegra, of AMD and of WSL."""


class HostMemory(NamedTuple):
    """Memory in bytes; None if the system does not report it."""

    total_bytes: int | None
    available_bytes: int | None
    source: str
    """Source of the figures, in words."""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_gpu_driver(*, devices: Path = Path("/dev")) -> bool:
    """Return whether the driver of a GPU is loaded, without any library; False elsewhere than on Linux."""
    return any((devices / name).exists() for name in _GPU_DRIVERS)


def host_memory(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Read the memory that this process may use, from the mount points of procfs and the control groups."""
    total, available = (_field(proc / "meminfo", name) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    if not total or not available:
        return HostMemory(total or None, None, "this system does not report its free memory")
    source = "MemAvailable of the machine"
    for folder in _groups(proc, cgroups):
        limit = _field(folder / "memory.max")
        if 0 < limit < total:
            left = limit - _field(folder / "memory.current") + _field(folder / "memory.stat", "inactive_file")
            total, available = limit, max(0, min(available, left))
            source = "the control group's memory.max"
    return HostMemory(total, available, source)


def count_oom_kills(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the processes of the control group and of the machine that Linux killed for want of memory."""
    return _field(cgroups / "memory.events", "oom_kill") + _field(proc / "vmstat", "oom_kill")


def cpu_name(*, proc: Path = Path("/proc")) -> str:
    """Return the model of the processor."""
    found = re.search(r"^model name\s*:\s*(\S.*?)\s*$", _read(proc / "cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine() or "CPU"


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the control groups of this process, its own first: a parent may have a lower limit."""
    found = re.search(r"^0::(.*)$", _read(proc / "self" / "cgroup"), re.MULTILINE)
    # In a container the path may be the host's, with the group mounted as the root.
    parts = Path(found[1].strip("/ ")).parts if found else ()
    return [cgroups.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)] if found else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(path: Path, name: str = "") -> int:
    """Return the number after a name at the beginning of a line; 0 if there is none."""
    found = re.search(rf"^{name}\s*(\d+)\s", _read(path), re.MULTILINE)
    return int(found[1]) if found else 0
