"""NVML: the readings of NVIDIA's driver. Only this module imports pynvml (distribution nvidia-ml-py).

Every reading opens NVML, asks and shuts it down again. NVML is optional: a failure becomes an `NvmlAbsent`
with a reason in one line, and a figure that a GPU does not report becomes None. Sizes are bytes. NVML ignores
``CUDA_VISIBLE_DEVICES``, so GPUs are identified by UUID.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, TypeVar

from autobatch.core.records import MemoryHolder, Record
from autobatch.core.text import error_text

T = TypeVar("T")
_REASONS = {  # by NVML's error number
    3: "the GPU does not offer this reading (unified memory, or a virtual GPU)",
    4: "no permission to query the driver",
    6: "no GPU with that UUID",
    9: "the NVIDIA driver is not loaded",
    12: "the driver's library (libnvidia-ml) was not found: no NVIDIA driver, or a container without it",
    13: "the driver is older than nvidia-ml-py expects",
    15: "a GPU is lost: it no longer answers on the bus",
    16: "a GPU needs a reset",
    17: "the operating system blocks the driver's library",
    18: "the driver and its library have different versions: restart after a driver update",
    999: "unknown error 999: the container may have lost its GPUs: restart it",
}
_REINSTALL = "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py"


class NvmlGpu(Record, frozen=True, kw_only=True):
    """A GPU, or a MIG slice of one, as NVML reports it."""

    uuid: str
    """UUID with its prefix: ``GPU-…``, or ``MIG-…`` for a slice."""
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    """The figure for budgets: releases disagree on whether `used_bytes` includes the driver's share."""
    used_bytes: int | None
    driver_reserved_bytes: int | None
    pci_bus_id: str | None
    mig_mode: bool | None
    """True if the GPU is split into slices; None if it does not support that."""
    mig_uuids: list[str]
    driver_version: str | None


class NvmlReading(Record, frozen=True, kw_only=True):
    """All GPUs that the driver shows to this process, by PCI bus."""

    driver_version: str | None
    gpus: list[NvmlGpu]
    notes: list[str]
    """GPUs that did not answer, one per line."""


class NvmlAbsent(Record, frozen=True, kw_only=True):
    """A missing reading, which is no error."""

    reason: str


def read_gpus() -> NvmlReading | NvmlAbsent:
    """List the GPUs with their memory, or return the reason that there is no reading."""

    def read(nvml: Any) -> NvmlReading:
        gpus, notes = [], []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
            except Exception as error:
                notes.append(f"GPU {index} does not answer: {_reason(error)}")
        version = _optional(nvml, "nvmlSystemGetDriverVersion")
        gpus.sort(key=lambda gpu: gpu.pci_bus_id or "")
        return NvmlReading(driver_version=version, gpus=gpus, notes=notes)

    return _ask(read)


def read_gpu(*uuids: str) -> NvmlGpu | NvmlAbsent:
    """Read a GPU, or a MIG slice, by its UUID with prefix (``GPU-…``, ``MIG-…``): the first that exists."""

    def read(nvml: Any) -> NvmlGpu:
        for uuid in uuids[:-1]:
            with contextlib.suppress(Exception):
                return _gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        return _gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuids[-1]))

    return _ask(read)


def driver_version() -> str | None:
    """Return the version of the driver; None without NVML."""
    found = read_gpus()
    return None if isinstance(found, NvmlAbsent) else found.driver_version


def read_holders(uuid: str) -> list[MemoryHolder] | NvmlAbsent:
    """List the processes that hold memory of a GPU, including this one, largest first.

    Process ids are the host's. In a container they match no process, so only show them.
    """

    def read(nvml: Any) -> list[MemoryHolder]:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        graphics = _optional(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle) or []
        used: dict[int, int | None] = {}
        for process in [*compute, *graphics]:
            # A process that computes and draws is listed twice, each time with all of its memory.
            known = [size for size in (used.get(process.pid), process.usedGpuMemory) if size is not None]
            used[process.pid] = max(known, default=None)
        return [
            MemoryHolder(
                pid=pid, name=_optional(nvml, "nvmlSystemGetProcessName", pid) or None, used_bytes=size
            )
            for pid, size in sorted(used.items(), key=lambda item: (-(item[1] or 0), item[0]))
        ]

    return _ask(read)


def _ask(question: Callable[[Any], T]) -> T | NvmlAbsent:
    """Call a function with NVML open, or return the reason of its failure. All its errors are caught here."""
    nvml = _bindings()
    if isinstance(nvml, NvmlAbsent):
        return nvml
    try:
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()
    except Exception as error:  # its bindings raise more than NVMLError, depending on the release
        return NvmlAbsent(reason=_reason(error))


def _bindings() -> Any:
    """Import pynvml, or return an `NvmlAbsent` with what to install or uninstall."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return NvmlAbsent(reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    except Exception as error:  # another or a broken module of that name may raise anything
        return NvmlAbsent(reason=f"pynvml cannot be imported ({type(error).__name__}): {_REINSTALL}")
    if hasattr(nvml, "__path__") and any(importlib.metadata.distributions(name="pynvml")):
        return NvmlAbsent(reason=f"the deprecated distribution pynvml hides nvidia-ml-py: {_REINSTALL}")
    if not all(hasattr(nvml, name) for name in ("nvmlInit", "NVMLError", "NVMLLibraryMismatchError")):
        return NvmlAbsent(reason=f"the module pynvml is not the one of nvidia-ml-py: {_REINSTALL}")
    return nvml


def _reason(error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in _REASONS:
        return _REASONS[code]
    if type(error).__name__ == "NVMLLibraryMismatchError":
        return _REASONS[13]
    text = error_text(error)
    return f"NVML error {code}: {text}" if code is not None else f"{type(error).__name__}: {text}"


def _optional(nvml: Any, function: str, *args: Any) -> Any:
    """Call one NVML function; return None if it fails."""
    call = getattr(nvml, function, None)  # bindings of another release may lack it
    try:
        return call(*args) if call else None
    except Exception:
        return None


def _gpu(nvml: Any, handle: Any) -> NvmlGpu:
    memory = _optional(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is not None and not memory.total:
        memory = None  # unified memory, on drivers that do not report it as "not supported"
    detailed = _optional(nvml, "nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", None))
    pci = _optional(nvml, "nvmlDeviceGetPciInfo", handle)
    mig = _optional(nvml, "nvmlDeviceGetMigMode", handle)
    return NvmlGpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_optional(nvml, "nvmlDeviceGetName", handle),
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        used_bytes=memory.used if memory else None,
        driver_reserved_bytes=getattr(detailed, "reserved", None),
        pci_bus_id=pci.busId if pci else None,
        mig_mode=bool(mig[0]) if mig else None,
        mig_uuids=_slices(nvml, handle) if mig and mig[0] else [],
        driver_version=_optional(nvml, "nvmlSystemGetDriverVersion"),
    )


def _slices(nvml: Any, handle: Any) -> list[str]:
    uuids = []
    for index in range(_optional(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        piece = _optional(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuids.append(_optional(nvml, "nvmlDeviceGetUUID", piece) if piece is not None else None)
    return [uuid for uuid in uuids if uuid is not None]
