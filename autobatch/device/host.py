"""The machine: the memory that this process may use, its processor, and its GPUs as NVML reports them.

Memory is the lower of the machine's and its control groups' figures.

Control groups: docs.kernel.org/admin-guide/cgroup-v2.html (``memory.max``, ``memory.current``). Their usage
includes the page cache, of which the kernel can reclaim ``inactive_file``: that part counts as available.

NVML tells the free memory of GPUs, and the processes that hold the rest. It is optional: a failure is
answered with its reason, and a figure that a GPU does not report is None. NVML ignores
``CUDA_VISIBLE_DEVICES``, so GPUs are named by UUID. Sizes are bytes. Only this module imports pynvml.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from autobatch.core.records import MemoryHolder, Record
from autobatch.core.text import error_text

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


T = TypeVar("T")


class NvmlGpu(Record, frozen=True, kw_only=True):
    """A GPU, or a MIG slice of one, as NVML reports it."""

    uuid: str
    """With prefix: ``GPU-…``, or ``MIG-…`` for a slice."""
    name: str | None
    free_bytes: int | None
    used_bytes: int | None
    """Held by processes, without the driver's share."""
    holders: list[MemoryHolder]
    """Those processes, this one included, largest first, by the host's process ids."""


def read_gpus() -> list[NvmlGpu] | str:
    """List the GPUs that the driver shows, which may be more than torch may use; else return the reason."""

    def read(nvml: Any) -> list[NvmlGpu]:
        return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(at)) for at in range(nvml.nvmlDeviceGetCount())]

    return _ask(read)


def read_gpu(uuid: str) -> NvmlGpu | str:
    """Read a GPU, or a MIG slice, by its UUID without prefix, as torch has it; else return the reason."""

    def read(nvml: Any) -> NvmlGpu:
        handle = _or_none(nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}")
        if handle is None:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            if (_or_none(nvml.nvmlDeviceGetMigMode, handle) or [0])[0]:
                raise LookupError("the GPU is split by MIG, and its figures are not those of the slice")
        return _gpu(nvml, handle)

    return _ask(read)


def _ask(question: Callable[[Any], T]) -> T | str:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            _or_none(nvml.nvmlShutdown)
    except Exception as error:  # another module of that name may raise anything
        return f"NVML: {error_text(error)}"


def _gpu(nvml: Any, handle: Any) -> NvmlGpu:
    memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    memory = memory if memory and memory.total else None  # some drivers report unified memory as 0
    processes = [
        *(_or_none(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        *(_or_none(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()),
    ]
    # A process that computes and draws is listed twice, each time with all of its memory.
    used = {process.pid: process.usedGpuMemory for process in processes}
    return NvmlGpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle),
        free_bytes=memory.free if memory else None,
        used_bytes=memory.used if memory else None,
        holders=[
            MemoryHolder(pid=pid, name=_or_none(nvml.nvmlSystemGetProcessName, pid), used_bytes=size)
            for pid, size in sorted(used.items(), key=lambda item: (-(item[1] or 0), item[0]))
        ],
    )


def _or_none(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception:
        return None
