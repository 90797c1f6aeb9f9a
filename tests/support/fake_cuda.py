"""A stand-in for ``torch.cuda`` and NVML: one GPU whose figures a test sets. It knows no tensors."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autobatch.core.units import GiB
from autobatch.device import nvml
from autobatch.device.nvml import NvmlGpu


def gpu_reading() -> NvmlGpu:
    return NvmlGpu(uuid="GPU-a1", name="Alpha", free_bytes=None, used_bytes=4 * GiB, holders=[])


class FakeCuda:
    """One GPU of 24 GiB. The test sets what its allocator did."""

    def __init__(self) -> None:
        self.waits = 0
        self.total = 24 * GiB
        self.allowed = self.total
        self.driver_free = 20 * GiB
        self.lost = ""
        """Error of every call that reaches the GPU, once its context is lost."""
        self.refused = ""
        """Error of the first call, which creates the context."""
        self.capability = (8, 9)
        self.is_recording = False
        self.figures = {
            "allocated_bytes.all.current": 1,
            "allocated_bytes.all.peak": 3,
            "reserved_bytes.all.current": 2 * GiB,
            "reserved_bytes.all.peak": 4 * GiB,
            "num_alloc_retries": 7,
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch and NVML answer for this GPU."""
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_allocator_backend": lambda: "native",
            "device": nullcontext,
            "memory_allocated": lambda _: 0,
            "memory_reserved": lambda _: self.figures["reserved_bytes.all.current"],
            "reset_peak_memory_stats": lambda _: None,
            "mem_get_info": lambda _: (self.driver_free, 24 * GiB),
            "get_per_process_memory_fraction": lambda _: self.allowed / self.total,
            "empty_cache": self._reach,
            **{name: getattr(self, name) for name in vars(FakeCuda) if name[0] != "_" and name != "install"},
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(nvml, "read_gpu", lambda _: gpu_reading())
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(name="Alpha", total_memory=self.total, uuid="a1", major=major, minor=minor)

    def synchronize(self, index: int) -> None:
        if self.refused:
            raise torch.AcceleratorError(self.refused)
        self.waits += 1

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        nested: dict[str, Any] = {"num_alloc_retries": self.figures["num_alloc_retries"]}
        nested["active"] = {"all": {"allocated": 100, "freed": 5}}
        for kind in ("allocated_bytes", "reserved_bytes"):
            nested[kind] = {"all": {at: self.figures[f"{kind}.all.{at}"] for at in ("current", "peak")}}
        return nested

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self._reach()
        # As the allocator computes it: static_cast<size_t>(fraction * double(total)).
        self.allowed = int(fraction * float(self.total))

    def _record(self, *, enabled: str | None, **_: object) -> None:
        self.is_recording = enabled is not None

    def _reach(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)
