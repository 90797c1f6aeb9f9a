"""A stand-in for ``torch.cuda`` and NVML: one GPU whose figures a test sets. It knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
        answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "device": self._device,
            "synchronize": self._synchronize,
            "get_allocator_backend": lambda: self.backend,
            "get_device_properties": self._properties,
            "memory_allocated": lambda _: self.held,
            "memory_reserved": lambda _: self.figures["reserved_bytes.all.current"],
            "memory_stats_as_nested_dict": self._stats,
            "reset_peak_memory_stats": lambda _: self.calls.append("reset"),
            "empty_cache": lambda: self._call("empty"),
            "mem_get_info": lambda _: (self.driver_free, 24 * GiB),
            "set_per_process_memory_fraction": self._allow,
            "get_per_process_memory_fraction": lambda _: self.allowed / self.total,
            "memory._snapshot": lambda *_: self.snapshot,
            "memory._record_memory_history": self._record,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(f"torch.cuda.{name}", answer)
        for name, call in (
            ("accelerator.empty_host_cache", "unpin"),
            ("_C._cuda_clearCublasWorkspaces", "clear"),
        ):
            monkeypatch.setattr(f"torch.{name}", partial(self.calls.append, call), raising=False)
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(nvml, "read_gpu", lambda uuid: self.nvml())
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)

    def _record(self, *, enabled: str | None, **_: object) -> None:
        self.is_recording = enabled is not None

    def _properties(self, index: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(name="Alpha", total_memory=self.total, uuid="a1", major=major, minor=minor)

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def _synchronize(self, index: int) -> None:
        if self.refused:
            raise torch.AcceleratorError(self.refused)
        self.initialized = True
        self.waits += 1

    def _stats(self, index: int) -> dict[str, Any]:
        nested: dict[str, Any] = {"num_alloc_retries": self.figures["num_alloc_retries"]}
        nested["active"] = {"all": {"allocated": self.events_so_far, "freed": 5}}
        for kind in ("allocated_bytes", "reserved_bytes"):
            nested[kind] = {"all": {at: self.figures[f"{kind}.all.{at}"] for at in ("current", "peak")}}
        return nested

    def _allow(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        # As the allocator computes it: static_cast<size_t>(fraction * double(total)).
        allowed = int(fraction * float(self.total))
        self._call(f"allow {allowed}")
        self.allowed = allowed

    def _call(self, name: str) -> None:
        if self.lost:
            raise RuntimeError(self.lost)
        self.calls.append(name)
