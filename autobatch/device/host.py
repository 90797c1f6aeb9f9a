"""The machine: the memory that this process may use, its processor, and what compiles kernels there.

Memory is the lower of the machine's and its control groups' figures.

Control groups: docs.kernel.org/admin-guide/cgroup-v2.html (``memory.max``, ``memory.current``). Their usage
includes the page cache, of which the kernel can reclaim ``inactive_file``: that part counts as available.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LEAST_COMPILED_CAPABILITY = (7, 0)
"""The first GPUs for which Inductor has kernels (``has_triton`` in torch/utils/_triton.py)."""
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
    best = _machine(proc)
    for folder in _groups(proc, cgroups):
        limit, usage = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is None or usage is None or (best.total_bytes is not None and limit >= best.total_bytes):
            continue
        available = max(0, limit - usage + _field(folder / "memory.stat", "inactive_file"))
        if best.available_bytes is not None:
            available = min(available, best.available_bytes)
        best = HostMemory(limit, available, "the control group's memory.max")
    return best


def count_oom_kills(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the processes of the control group and of the machine that Linux killed for want of memory."""
    return _field(cgroups / "memory.events", "oom_kill") + _field(proc / "vmstat", "oom_kill")


def cpu_name(*, proc: Path = Path("/proc")) -> str:
    """Return the model of the processor."""
    for line in _lines(proc / "cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def compiler_missing_on_cpu() -> str | None:
    """Return what is missing for kernels of the CPU, which Inductor writes in C++; None if nothing."""
    return _toolchain_missing("a C++ compiler on the CPU", os.environ.get("CXX"), "g++", "clang++", "c++")


def compiler_missing_on_gpu(capability: tuple[int, int]) -> str | None:
    """Return what is missing for kernels of a GPU, which Triton compiles; None if nothing.

    Triton compiles a module in C that launches them (triton/runtime/build.py).
    """
    if capability < LEAST_COMPILED_CAPABILITY:
        needed, present = (".".join(map(str, version)) for version in (LEAST_COMPILED_CAPABILITY, capability))
        return f"torch.compile needs a GPU of compute capability {needed} or later, found {present}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on a GPU"
    return _toolchain_missing("gcc or clang on a GPU", os.environ.get("CC"), "gcc", "clang")


def _toolchain_missing(needed: str, *compilers: str | None) -> str | None:
    if not any(name and shutil.which(name) for name in compilers):
        return f"torch.compile needs {needed}"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if headers.exists() else f"torch.compile needs Python's headers, and {headers} is not there"


def _machine(proc: Path) -> HostMemory:
    total = _field(proc / "meminfo", "MemTotal:") * 1024
    available = _field(proc / "meminfo", "MemAvailable:") * 1024
    if total:
        return HostMemory(total, available or None, "MemAvailable of the machine")
    page = _system("SC_PAGE_SIZE")
    pages, free = _system("SC_PHYS_PAGES"), _system("SC_AVPHYS_PAGES")
    if page is None or pages is None:
        return HostMemory(None, None, "this system does not report its memory")
    if free is None:
        return HostMemory(page * pages, None, "this system does not report its free memory")
    return HostMemory(page * pages, page * free, "sysconf")


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the control groups of this process, its own first: a parent may have a lower limit."""
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::"):
            # In a container the path may be the host's, with the group mounted as the root.
            folder = cgroups / line.removeprefix("0::").strip().lstrip("/")
            yield from (
                folder,
                *(parent for parent in folder.parents if cgroups in (parent, *parent.parents)),
            )


def _system(name: str) -> int | None:
    try:
        value = os.sysconf(name)
    except (AttributeError, OSError, ValueError):
        return None
    return value if value > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _field(path: Path, name: str) -> int:
    """Return the number after a name; 0 if there is none."""
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0
