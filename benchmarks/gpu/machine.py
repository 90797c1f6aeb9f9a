"""The GPU that is measured, and a stand-in on which every measurement can be rehearsed without a GPU.

A measurement asks a `Machine` for everything that only CUDA has, so that the same lines run on both. The
figures of a rehearsal mean nothing: they show that the lines run.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from autobatch.core.units import GiB
from autobatch.device.base import Device
from autobatch.device.cuda_settings import free_workspaces
from autobatch.device.select import open_device

Entries = Callable[[], list[dict[str, Any]]]
"""Returns the entries of the allocator since the recording began."""
BUSY_CYCLES = 400_000_000
"""About 0.2 seconds of a GPU at 2 GHz."""
SMALLER = 512
"""Factor between a budget on a GPU and the budget of a rehearsal."""


class Machine(Protocol):
    """What the measurements need of a GPU. All sizes are bytes."""

    name: str
    """Name of the device, as ``--device`` takes it."""
    is_real: bool
    torch_device: torch.device

    def about(self) -> dict[str, Any]:
        """Return the name, the versions and the figures of the GPU."""

    def open(self, budget_bytes: int | None = None) -> Device:
        """Open the device with a budget; None for all that is free."""

    def budget(self, budget_bytes: int) -> int:
        """Return the budget that stands for this one here."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the free and the total memory that the driver reports."""

    def reserved(self) -> int:
        """Return what the allocator of this process holds."""

    def allocated(self) -> int:
        """Return what the tensors of this process hold."""

    def peak(self) -> int:
        """Return the largest `allocated` since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin a new peak."""

    def recorded(self) -> contextlib.AbstractContextManager[Entries]:
        """Record the entries of the allocator within the block."""

    def empty(self) -> None:
        """Free the workspaces of libraries and the cache of the allocator."""

    def keep_busy(self) -> None:
        """Put work on the stream that takes about 0.2 seconds, and return at once."""

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work."""


class CudaMachine:
    """The first CUDA GPU of this machine."""

    name = "cuda:0"
    is_real = True
    torch_device = torch.device("cuda", 0)

    def about(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(0)
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
            "sets_allocator": hasattr(torch._C, "_accelerator_setAllocatorSettings"),
            "reads_allocator": hasattr(torch._C, "_accelerator_getAllocatorSettings"),
        }

    def open(self, budget_bytes: int | None = None) -> Device:
        return open_device(self.name, memory_budget=budget_bytes, environ=os.environ)

    def budget(self, budget_bytes: int) -> int:
        return budget_bytes

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(0)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(0)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(0)

    def peak(self) -> int:
        self.synchronize()
        return torch.cuda.max_memory_allocated(0)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(0)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Entries]:
        def entries() -> list[dict[str, Any]]:
            self.synchronize()
            return list(torch.cuda.memory._snapshot(0)["device_traces"][0])

        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=300_000)
        try:
            yield entries
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def empty(self) -> None:
        free_workspaces()
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()

    def keep_busy(self) -> None:
        torch.cuda._sleep(BUSY_CYCLES)

    def synchronize(self) -> None:
        torch.cuda.synchronize(0)


class StandIn:
    """A simulated H200 on the CPU, with budgets that are 512 times smaller."""

    name = "sim:h200"
    is_real = False
    torch_device = torch.device("cpu")

    def about(self) -> dict[str, Any]:
        return {
            "gpu": "stand-in",
            "uuid": "",
            "capability": [9, 0],
            "total_bytes": 140 * GiB,
            "torch": str(torch.__version__),
            "cuda": None,
        }

    def open(self, budget_bytes: int | None = None) -> Device:
        return open_device(self.name, memory_budget=budget_bytes, environ=os.environ)

    def budget(self, budget_bytes: int) -> int:
        return budget_bytes // SMALLER

    def free_and_total(self) -> tuple[int, int]:
        return 139 * GiB, 140 * GiB

    def reserved(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Entries]:
        taken = {"addr": 4096, "size": 1024}
        yield lambda: [
            {"action": "segment_alloc", "addr": 4096, "size": 2 << 20},
            {"action": "alloc"} | taken,
            {"action": "free_completed"} | taken,
            {"action": "oom", "size": 1 << 40, "device_free": 0},
        ]

    def empty(self) -> None:
        pass

    def keep_busy(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def machine_of(name: str) -> Machine:
    """Return the machine of a name: ``cuda``, or ``stand-in``."""
    return CudaMachine() if name == "cuda" else StandIn()
