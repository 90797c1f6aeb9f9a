"""GPUs as torch and NVML see them: which there are, what is free, and what other processes hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.records import Record
from autobatch.core.units import MiB, format_bytes
from autobatch.device import nvml
from autobatch.device.host import host_memory
from autobatch.device.oom import first_line, is_oom

NOTABLE_BYTES = 256 * MiB
"""Difference between the free memory of NVML and of the CUDA driver above which a limit explains it."""
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Any value of it switches torch's allocator off (c10/cuda/CUDACachingAllocator.cpp)."""
FORKED = (
    "this process was forked from one that had started CUDA, which no fork survives: start it with the "
    "method spawn of multiprocessing"
)
"""Reason and advice for `is_forked_from_cuda`."""


class VisibleGpu(Record, frozen=True, kw_only=True):
    """A GPU that torch can use, for reports."""

    index: int
    """The number in ``cuda:N``."""
    name: str
    uuid: str | None
    total_bytes: int
    free_bytes: int | None
    capability: str
    """Compute capability, such as ``9.0``."""


def visible_gpus() -> list[VisibleGpu]:
    """List the GPUs that torch can use, in torch's order; empty without a GPU or a CUDA build."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "")) or None
        gpu = read_nvml(uuid)
        gpus.append(
            VisibleGpu(
                index=index,
                name=properties.name,
                uuid=uuid,
                total_bytes=properties.total_memory,
                free_bytes=gpu.free_bytes if isinstance(gpu, nvml.NvmlGpu) else None,
                capability=f"{properties.major}.{properties.minor}",
            )
        )
    return gpus


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked from one that had started CUDA, so that it has no GPU."""
    asked = getattr(torch._C, "_cuda_isInBadFork", None)
    return asked is not None and bool(asked())


def read_nvml(uuid: str | None) -> nvml.NvmlGpu | nvml.NvmlAbsent:
    """Read a GPU from NVML by torch's UUID, which lacks the prefix that tells a MIG slice from a GPU."""
    if uuid is None:
        return nvml.NvmlAbsent(reason="torch does not report the UUID of the GPU")
    gpu = nvml.read_gpu(f"MIG-{uuid}", f"GPU-{uuid}")
    if isinstance(gpu, nvml.NvmlGpu) and gpu.mig_mode:
        return nvml.NvmlAbsent(reason="the GPU is split by MIG, and its figures are not those of the slice")
    return gpu


def read_free(index: int, properties: Any, gpu: nvml.NvmlGpu | nvml.NvmlAbsent) -> tuple[int, str, list[str]]:
    """Return the free memory of a GPU in bytes, the source of that figure, and notes on it."""
    if properties.is_integrated:
        # The driver's own figure is the free memory of the host, which counts its page cache as used.
        host = host_memory()
        if host.available_bytes is not None:
            return host.available_bytes, host.source, ["the GPU shares the host's memory"]
    free_bytes, _ = torch.cuda.mem_get_info(index)
    if isinstance(gpu, nvml.NvmlGpu) and gpu.free_bytes is not None:
        if gpu.free_bytes - free_bytes <= NOTABLE_BYTES:
            return gpu.free_bytes, "NVML", []
        note = (
            f"NVML reports {format_bytes(gpu.free_bytes)} free, and the CUDA driver grants this process less"
        )
        return free_bytes, "the CUDA driver", [f"{note}, as under a limit of MPS or of a virtual GPU"]
    reason = gpu.reason if isinstance(gpu, nvml.NvmlAbsent) else "the GPU does not report free memory"
    return free_bytes, "the CUDA driver", [f"no figures from NVML: {reason}"]


def used_bytes(gpu: nvml.NvmlGpu | nvml.NvmlAbsent) -> int | None:
    """Return the bytes that processes hold on a GPU; None if NVML has no figures.

    Its total less its free memory includes the driver's share, which is nobody's.
    """
    if isinstance(gpu, nvml.NvmlAbsent) or gpu.total_bytes is None or gpu.free_bytes is None:
        return None
    return gpu.total_bytes - gpu.free_bytes - (gpu.driver_reserved_bytes or 0)


def growth(before: int | None, after: int | None) -> int:
    """Return by how much bytes have grown; 0 if that is unknown."""
    return 0 if before is None or after is None else max(0, after - before)


def require_usable(index: int, environ: Mapping[str, str]) -> None:
    """Check that torch finds a GPU, and that its allocator counts and limits the memory there.

    Raises:
        InputError: There is no such GPU, or the allocator is switched off or replaced.
    """
    if is_forked_from_cuda():
        raise InputError(f"cuda:{index} was asked for, and {FORKED}")
    if not torch.cuda.is_available():
        raise InputError(
            f"cuda:{index} was asked for, and torch {torch.__version__} finds no CUDA GPU: "
            "run `autobatch doctor` to see why, or use --device cpu"
        )
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise InputError(f"cuda:{index} was asked for, and torch finds {count}: cuda:0 to cuda:{count - 1}")
    if UNCACHED in environ:
        raise InputError(
            f"{UNCACHED} is set, with which torch neither counts nor limits the memory of a GPU, so no "
            "budget can be kept: unset it"
        )
    backend = torch.cuda.get_allocator_backend()
    if backend not in ("native", "cudaMallocAsync"):
        raise InputError(
            f"torch's allocator for GPUs was replaced ({backend}), so that memory is neither counted nor "
            "limited and no budget can be kept: do not call torch.cuda.memory.change_current_allocator"
        )


def lacking_kernels(index: int, capability: tuple[int, int]) -> str | None:
    """Return in words that torch was built without kernels for a GPU; None if it has them, or if unknown."""
    built_for = [] if torch.version.hip else torch.cuda.get_arch_list()
    if not built_for or any(_runs_on(one, capability) for one in built_for):
        return None
    return (
        f"cuda:{index} has compute capability {capability[0]}.{capability[1]}, and torch {torch.__version__} "
        f"has kernels for {', '.join(built_for)} only: install a build of torch for another version of CUDA"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture, as ``torch.cuda.get_arch_list`` names it, runs on a GPU.

    Machine code (``sm_80``) runs on its own major capability from its minor on, code with a letter
    (``sm_90a``) nowhere else for certain, and PTX (``compute_80``) from its capability on.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if found is None:
        return True  # an architecture that is unknown here
    code = int(found[2]), int(found[3])
    is_later = code <= capability and not found[4]
    return code == capability or (is_later and (found[1] == "compute" or code[0] == capability[0]))


def open_context(index: int, gpu: nvml.NvmlGpu | nvml.NvmlAbsent) -> None:
    """Create the CUDA context of a GPU, with its last reading for the message.

    Raises:
        DoesNotFitError: The GPU has no memory for a context.
        InputError: The driver refuses one, for example because another process has the GPU for itself.
    """
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        free = ""
        if isinstance(gpu, nvml.NvmlGpu) and gpu.free_bytes is not None:
            free = f" ({format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} are free)"
        if is_oom(error):
            raise DoesNotFitError(
                f"cuda:{index} has no memory for a CUDA context{free}: end other processes that use it, "
                "which `autobatch doctor` lists, or choose another GPU with --device cuda:N"
            ) from error
        raise InputError(
            f"cuda:{index} cannot be opened{free}: {first_line(error)}; look at its processes, its state and "
            "its compute mode with nvidia-smi, or choose another GPU with --device cuda:N"
        ) from error
