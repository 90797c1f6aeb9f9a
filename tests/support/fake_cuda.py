"""A stand-in for ``torch.cuda`` and NVML: one GPU whose figures a test sets. It knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autobatch.core.records import MemoryHolder
from autobatch.core.units import GiB
from autobatch.device import nvml
from autobatch.device.nvml import NvmlAbsent, NvmlGpu


def gpu_reading(used: int | None = 4 * GiB, holders: Sequence[MemoryHolder] = ()) -> NvmlGpu:
    return NvmlGpu(uuid="GPU-a1", name="Alpha", free_bytes=None, used_bytes=used, holders=[*holders])


class FakeCuda:
    """One GPU of 24 GiB. The test sets what its allocator did, and what NVML says."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.nvml: Callable[[], NvmlGpu | NvmlAbsent] = gpu_reading
        self.initialized = False
        self.waits = 0
        self.total = 24 * GiB
        self.allowed = self.total
        self.held = 0
        self.driver_free = 20 * GiB
        self.current = 7
        self.lost = ""
        """Error of every call that reaches the GPU, once its context is lost."""
        self.refused = ""
        """Error of the first call, which creates the context."""
        self.capability = (8, 9)
        self.backend = "native"
        self.is_recording = False
        self.snapshot: dict[str, Any] = {}
        self.events_so_far = 100
        """Allocations since the process began."""
        self.figures = {
            "allocated_bytes.all.current": 1,
            "allocated_bytes.all.peak": 3,
            "reserved_bytes.all.current": 2 * GiB,
            "reserved_bytes.all.peak": 4 * GiB,
            "num_alloc_retries": 7,
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch and NVML answer for this GPU."""
        for name in vars(FakeCuda):
            if not name.startswith("_") and name != "install":
                monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *_: self.snapshot)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(
            torch.accelerator, "empty_host_cache", lambda: self.calls.append("unpin"), raising=False
        )
        clear = "_cuda_clearCublasWorkspaces"
        monkeypatch.setattr(torch._C, clear, lambda: self.calls.append("clear"), raising=False)
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(nvml, "read_gpu", lambda uuid: self.nvml())
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)

    def _record(self, *, enabled: str | None, **_: object) -> None:
        self.is_recording = enabled is not None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_allocator_backend(self) -> str:
        return self.backend

    def get_device_properties(self, index: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(
            name="Alpha",
            total_memory=self.total,
            uuid="a1",
            major=major,
            minor=minor,
        )

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def synchronize(self, index: int) -> None:
        if self.refused:
            raise torch.AcceleratorError(self.refused)
        self.initialized = True
        self.waits += 1

    def memory_allocated(self, index: int) -> int:
        return self.held

    def memory_reserved(self, index: int) -> int:
        return self.figures["reserved_bytes.all.current"]

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        nested: dict[str, Any] = {"num_alloc_retries": self.figures["num_alloc_retries"]}
        nested["active"] = {"all": {"allocated": self.events_so_far, "freed": 5}}
        for kind in ("allocated_bytes", "reserved_bytes"):
            nested[kind] = {"all": {one: self.figures[f"{kind}.all.{one}"] for one in ("current", "peak")}}
        return nested

    def reset_peak_memory_stats(self, index: int) -> None:
        self.calls.append("reset")

    def empty_cache(self) -> None:
        self._reach()
        self.calls.append("empty")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.driver_free, 24 * GiB

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        self._reach()
        # As the allocator computes it: static_cast<size_t>(fraction * double(total)).
        self.allowed = int(fraction * float(self.total))
        self.calls.append(f"allow {self.allowed}")

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.allowed / self.total

    def _reach(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)
