"""The first CUDA GPU of this machine, as the measurements use it. All sizes are bytes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autobatch.core.units import GiB
from autobatch.device.base import Device
from autobatch.device.cuda_allocator import free_workspaces
from autobatch.device.select import open_device

NAME = "cuda:0"
GPU = torch.device(NAME)
HEADROOM_BYTES = 2 * GiB
"""Free memory above a budget, because the context grows and other processes may start."""
ON_STUB = "STUB_GPU_STATE" in os.environ
"""Whether this is a rehearsal on the stub of `tests.stub_gpu`, on which losses are garbage."""
Entries = Callable[[], list[dict[str, Any]]]
"""Returns the entries of the allocator since the recording began."""


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
        "allocator": torch.cuda.get_allocator_backend(),
    }


def room() -> int:
    """Return the largest budget that this GPU has memory for."""
    free, _ = torch.cuda.mem_get_info(GPU)
    return free + torch.cuda.memory_reserved(GPU) - HEADROOM_BYTES


def open_gpu(most_bytes: int | None = None) -> Device:
    """Open the GPU with a budget, or with as much of it as there is."""
    budget = None if most_bytes is None else min(most_bytes, room())
    return open_device(NAME, memory_budget=budget, environ=os.environ)


@contextlib.contextmanager
def recorded_entries() -> Iterator[Entries]:
    """Record the entries of the allocator within the block."""

    def entries() -> list[dict[str, Any]]:
        torch.cuda.synchronize(GPU)
        return list(torch.cuda.memory._snapshot(0)["device_traces"][0])

    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=300_000)
    try:
        yield entries
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def empty() -> None:
    """Free the workspaces of libraries and the cache of the allocator."""
    free_workspaces()
    gc.collect()
    torch.cuda.synchronize(GPU)
    torch.cuda.empty_cache()
