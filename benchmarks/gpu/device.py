"""The first CUDA GPU of this machine, as the measurements use it. All sizes are bytes."""

from __future__ import annotations

import gc
from typing import Any

import torch

from autobatch.core.units import GiB
from autobatch.device.cuda import free_workspaces

NAME = "cuda:0"
GPU = torch.device(NAME)
HEADROOM_BYTES = 2 * GiB
"""Free memory above a budget, because the context grows and other processes may start."""


def about() -> dict[str, Any]:
    """Return the name, the versions and the figures of the GPU."""
    found = torch.cuda.get_device_properties(GPU)
    return {
        "gpu": found.name,
        "uuid": str(getattr(found, "uuid", "")),
        "capability": [found.major, found.minor],
        "total_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "integrated": bool(found.is_integrated),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def room() -> int:
    """Return the largest budget that this GPU has memory for."""
    free, _ = torch.cuda.mem_get_info(GPU)
    return free + torch.cuda.memory_reserved(GPU) - HEADROOM_BYTES


def empty() -> None:
    """Free the workspaces of libraries and the cache of the allocator."""
    free_workspaces()
    gc.collect()
    torch.cuda.synchronize(GPU)
    torch.cuda.empty_cache()
