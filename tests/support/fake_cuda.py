"""A stand-in for ``torch.cuda`` and NVML: one GPU whose figures a test sets. It knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from autobatch.core.units import GiB
from autobatch.device import nvml
from autobatch.device.nvml import NvmlAbsent, NvmlGpu


def gpu_reading(
    free: int | None = 20 * GiB, *, total: int = 24 * GiB, reserved: int | None = None, mig: bool = False
) -> NvmlGpu:
    return NvmlGpu(
        uuid="GPU-a1",
        name="Alpha",
        total_bytes=None if free is None else total,
        free_bytes=free,
        used_bytes=None,
        driver_reserved_bytes=reserved,
        pci_bus_id=None,
        mig_mode=mig,
        mig_uuids=[],
        driver_version=None,
    )


class FakeCuda:
    """One GPU of 24 GiB. The test sets what its allocator did."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.initialized = False
        self.total = 24 * GiB
        self.allowed = self.total
        self.integrated = 0
        self.held = 0
        self.driver_free = 24 * GiB
        self.current = 7
        self.lost = ""
        """Error of every call that reaches the GPU, once its context is lost."""
        self.capability = (8, 9)
        self.backend = "native"
        self.architectures = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
        self.figures = {
            "allocated_bytes.all.current": 1,
            "allocated_bytes.all.peak": 3,
            "reserved_bytes.all.current": 2 * GiB,
            "reserved_bytes.all.peak": 4 * GiB,
            "num_alloc_retries": 7,
        }

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 1

    def get_allocator_backend(self) -> str:
        return self.backend

    def get_arch_list(self) -> list[str]:
        return self.architectures

    def get_device_properties(self, index: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(
            name="Alpha",
            total_memory=self.total,
            is_integrated=self.integrated,
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
        self.initialized = True

    def memory_allocated(self, index: int) -> int:
        return self.held

    def memory_reserved(self, index: int) -> int:
        return self.figures["reserved_bytes.all.current"]

    def memory_stats(self, index: int) -> dict[str, int]:
        return self.figures

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
        self.allowed = int(fraction * float(self.total))
        self.calls.append(f"allow {self.allowed}")

    def _reach(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.allowed / self.total


def answer_nvml(monkeypatch: pytest.MonkeyPatch, read: Callable[[str], NvmlGpu | NvmlAbsent]) -> None:
    """Let NVML answer for each UUID, of which the first that exists counts."""

    def first(*uuids: str) -> NvmlGpu | NvmlAbsent:
        found = [read(uuid) for uuid in uuids]
        return next((one for one in found if isinstance(one, NvmlGpu)), found[-1])

    monkeypatch.setattr(nvml, "read_gpu", first)
