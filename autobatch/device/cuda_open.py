"""Checks of a GPU before anything runs on it: counted memory, kernels for it, and a context."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.units import format_bytes
from autobatch.device import nvml
from autobatch.device.oom import first_line, is_oom

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Any value of it switches torch's allocator off (c10/cuda/CUDACachingAllocator.cpp)."""


def require_counted(environ: Mapping[str, str]) -> None:
    """Check that torch's allocator counts and limits the memory of GPUs.

    Raises:
        InputError: It is switched off or replaced.
    """
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


def require_kernels(index: int, capability: tuple[int, int]) -> None:
    """Check that torch was built with kernels for a GPU.

    Raises:
        InputError: It was not; then every kernel fails with "no kernel image is available".
    """
    lacking = lacking_kernels(index, capability)
    if lacking is not None:
        raise InputError(f"{lacking}, or use --device cpu")


def lacking_kernels(index: int, capability: tuple[int, int]) -> str | None:
    """Return in words that torch was built without kernels for a GPU; None if it has them, or if unknown."""
    built_for = [] if torch.version.hip else torch.cuda.get_arch_list()
    if not built_for or has_kernels(built_for, capability):
        return None
    return (
        f"cuda:{index} has compute capability {capability[0]}.{capability[1]}, and torch {torch.__version__} "
        f"has kernels for {', '.join(built_for)} only: install a build of torch for another version of CUDA"
    )


def has_kernels(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a build of torch runs on a GPU.

    Machine code (``sm_80``) runs on its own major capability from its minor on, code with a letter
    (``sm_90a``) nowhere else for certain, and PTX (``compute_80``) from its capability on.

    Args:
        built_for: architectures, as ``torch.cuda.get_arch_list`` has them.
        capability: major and minor of the GPU.
    """
    for text in built_for:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", text)
        if found is None:
            return True  # an architecture that is unknown here
        code = int(found[2]), int(found[3])
        is_later = code <= capability and not found[4]
        if code == capability or (is_later and (found[1] == "compute" or code[0] == capability[0])):
            return True
    return False


def open_context(index: int, gpu: nvml.NvmlGpu | nvml.NvmlAbsent) -> None:
    """Create the CUDA context of a GPU in this process.

    Args:
        index: the GPU.
        gpu: its last reading, for the message.

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
