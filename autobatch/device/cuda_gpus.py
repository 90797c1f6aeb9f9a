"""Checks of a GPU before anything is counted on it: torch finds it, and may open it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.records import Record
from autobatch.device import private
from autobatch.device.oom import first_line, is_oom

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Any value of it switches torch's allocator off (c10/cuda/CUDACachingAllocator.cpp)."""
FORKED = (
    "this process was forked from one that had started CUDA, which no fork survives: start it with the "
    "method spawn of multiprocessing"
)
"""Reason and advice for `autobatch.device.private.is_forked_from_cuda`."""


class VisibleGpu(Record, frozen=True, kw_only=True):
    """A GPU that torch can use, for reports."""

    index: int
    """The number in ``cuda:N``."""
    name: str
    uuid: str
    total_bytes: int
    capability: str
    """Compute capability, such as ``9.0``."""


def visible_gpus() -> list[VisibleGpu]:
    """List the GPUs that torch can use, in torch's order; empty without a GPU or a CUDA build."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        VisibleGpu(
            index=index,
            name=gpu.name,
            uuid=str(getattr(gpu, "uuid", "")),
            total_bytes=gpu.total_memory,
            capability=f"{gpu.major}.{gpu.minor}",
        )
        for index, gpu in enumerate(map(torch.cuda.get_device_properties, range(count)))
    ]


def require_usable(index: int, environ: Mapping[str, str]) -> None:
    """Check that torch finds a GPU, and that its allocator counts and limits the memory there.

    Raises:
        InputError: There is no such GPU, or the allocator is switched off or replaced.
    """
    if private.is_forked_from_cuda():
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


def open_context(index: int) -> None:
    """Create the CUDA context of a GPU.

    Raises:
        DoesNotFitError: The GPU has no memory for a context.
        InputError: The driver refuses one, for example because another process has the GPU for itself.
    """
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        if is_oom(error):
            raise DoesNotFitError(
                f"cuda:{index} has no memory for a CUDA context: end other processes that use it, "
                "which `autobatch doctor` lists, or choose another GPU with --device cuda:N"
            ) from error
        raise InputError(
            f"cuda:{index} cannot be opened: {first_line(error)}; look at its processes, its state and "
            "its compute mode with nvidia-smi, or choose another GPU with --device cuda:N"
        ) from error
