"""NVML over a stand-in for its bindings; the tests on a stub GPU call the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from autobatch.core.units import GiB
from autobatch.device import nvml

GPUS = {"GPU-a": "Alpha", "GPU-b": "Beta"}
COMPUTING = [SimpleNamespace(pid=4711, usedGpuMemory=GiB), SimpleNamespace(pid=4712, usedGpuMemory=2 * GiB)]
DRAWING = [SimpleNamespace(pid=4712, usedGpuMemory=2 * GiB), SimpleNamespace(pid=4713, usedGpuMemory=64)]
DRIVER = GiB // 2
"""The driver's own share."""
NAMES = {4711: "python", 4712: "Xorg"}


def failing(*_: object) -> Any:
    raise RuntimeError("the driver is lost")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the bindings, whose functions a test may replace: two GPUs, the first of which is in use."""
    left = {"Alpha": (24 * GiB, 4 * GiB), "Beta": (80 * GiB, 0)}

    def memory(gpu: str, version: str) -> SimpleNamespace:
        total, used = left[GPUS[gpu]]
        return SimpleNamespace(total=total, used=used, free=total - used - DRIVER)

    found = SimpleNamespace(
        nvmlMemory_v2="v2",
        is_open=False,
        nvmlInit=lambda: setattr(found, "is_open", True),
        nvmlShutdown=lambda: setattr(found, "is_open", False),
        nvmlDeviceGetCount=lambda: len(GPUS),
        nvmlDeviceGetHandleByIndex=list(GPUS).__getitem__,
        nvmlDeviceGetHandleByUUID={uuid: uuid for uuid in GPUS}.__getitem__,
        nvmlDeviceGetMigMode=failing,
        nvmlDeviceGetUUID=str,
        nvmlDeviceGetName=GPUS.__getitem__,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: COMPUTING if gpu == "GPU-a" else [],
        nvmlDeviceGetGraphicsRunningProcesses=lambda gpu: DRAWING if gpu == "GPU-a" else [],
        nvmlSystemGetProcessName=NAMES.__getitem__,
    )
    assert {*vars(found)} - {"is_open"} <= {*dir(pynvml)}
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_the_gpus_and_who_holds_their_memory(driver: SimpleNamespace) -> None:
    alpha, beta = nvml.read_gpus()
    assert (alpha.uuid, alpha.name, alpha.used_bytes) == ("GPU-a", "Alpha", 4 * GiB)
    assert alpha.free_bytes == 20 * GiB - DRIVER
    holders = [(holder.pid, holder.name, holder.used_bytes) for holder in alpha.holders]
    assert holders == [(4712, "Xorg", 2 * GiB), (4711, "python", GiB), (4713, None, 64)]
    assert (beta.used_bytes, beta.holders) == (0, [])
    assert nvml.read_gpu("b") == beta
    assert not driver.is_open


def test_a_mig_slice_is_a_gpu_of_its_own(driver: SimpleNamespace) -> None:
    driver.nvmlDeviceGetMigMode = lambda gpu: [gpu == "GPU-b", 1]
    assert "split by MIG" in nvml.read_gpu("b")
    driver.nvmlDeviceGetHandleByUUID = {"MIG-b": "GPU-a", "GPU-b": "GPU-b"}.__getitem__
    assert nvml.read_gpu("b").name == "Alpha"


@pytest.mark.parametrize(
    ("function", "answer", "figure", "value"),
    [
        ("MemoryInfo", failing, "free_bytes", None),
        ("MemoryInfo", lambda *_: SimpleNamespace(total=0, used=0, free=0), "used_bytes", None),
        ("Name", failing, "name", None),
        ("ComputeRunningProcesses", failing, "holders", []),
    ],
)
def test_a_figure_that_cannot_be_read_is_none(
    driver: SimpleNamespace, function: str, answer: Callable[..., Any], figure: str, value: object
) -> None:
    setattr(driver, f"nvmlDeviceGet{function}", answer)
    driver.nvmlDeviceGetGraphicsRunningProcesses = lambda _: []
    assert getattr(nvml.read_gpu("a"), figure) == value


def test_an_error_of_the_driver_becomes_a_reason(driver: SimpleNamespace, monkeypatch) -> None:
    driver.nvmlDeviceGetHandleByIndex = failing
    assert "the driver is lost" in nvml.read_gpus()
    assert not driver.is_open
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml" in nvml.read_gpus()
