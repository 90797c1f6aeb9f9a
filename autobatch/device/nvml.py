"""NVML: free memory of GPUs, and the processes that hold the rest. Only this module imports pynvml.

It is optional: a failure is answered with its reason, and a figure that a GPU does not report is None. NVML
ignores ``CUDA_VISIBLE_DEVICES``, so GPUs are named by UUID. Sizes are bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from autobatch.core.records import MemoryHolder, Record
from autobatch.core.text import error_text

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
