"""The machine: memory from made-up /proc and control-group trees, and NVML over a stand-in for its bindings.

The tests on a stub GPU call the real bindings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from autobatch.core.units import GiB, MiB
from autobatch.device import host
from autobatch.device.host import count_oom_kills, cpu_name, has_gpu_driver, host_memory

MEMINFO = f"MemTotal:  {16 * MiB} kB\nMemFree: 1 kB\nMemAvailable:  {8 * MiB} kB\n"
"""16 GiB in all, 8 GiB available."""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # No control groups, and not even procfs.
        ({}, (16 * GiB, 8 * GiB)),
        ({"proc/meminfo": ""}, (None, None)),
        # The page cache that the kernel takes back is available.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "cg/memory.max": f"{4 * GiB}\n",
                "cg/memory.current": f"{3 * GiB}\n",
                "cg/memory.stat": f"anon 5\ninactive_file {GiB}\n",
            },
            (4 * GiB, 2 * GiB),
        ),
        # No limit of its own, one above it; the machine has less available than the group has left.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/b/memory.max": "max\n",
                "cg/a/b/memory.current": "1\n",
                "cg/a/memory.max": f"{12 * GiB}\n",
                "cg/a/memory.current": f"{GiB}\n",
            },
            (12 * GiB, 8 * GiB),
        ),
        # Over its limit.
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": "1000\n", "cg/memory.current": "2000\n"},
            (1000, 0),
        ),
    ],
)
def test_the_lower_of_the_machine_and_its_control_groups(tmp_path, files, expected):
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_memory(proc=tmp_path / "proc", cgroups=tmp_path / "cg")[:2] == expected


def test_what_linux_tells_of_its_processor_its_drivers_and_what_it_killed(tmp_path):
    assert cpu_name(proc=tmp_path)
    assert count_oom_kills(proc=tmp_path, cgroups=tmp_path) == 0
    assert not has_gpu_driver(devices=tmp_path)
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Made-up 9000 @ 3: GHz\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "vmstat").write_text("nr_free 7\noom_kill 5\n")
    (tmp_path / "kfd").touch()
    assert cpu_name(proc=tmp_path) == "Made-up 9000 @ 3: GHz"
    assert count_oom_kills(proc=tmp_path, cgroups=tmp_path) == 7
    assert has_gpu_driver(devices=tmp_path)


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
    alpha, beta = host.read_gpus()
    assert (alpha.uuid, alpha.name, alpha.used_bytes) == ("GPU-a", "Alpha", 4 * GiB)
    assert alpha.free_bytes == 20 * GiB - DRIVER
    holders = [(holder.pid, holder.name, holder.used_bytes) for holder in alpha.holders]
    assert holders == [(4712, "Xorg", 2 * GiB), (4711, "python", GiB), (4713, None, 64)]
    assert (beta.used_bytes, beta.holders) == (0, [])
    assert host.read_gpu("b") == beta
    assert not driver.is_open


def test_a_mig_slice_is_a_gpu_of_its_own(driver: SimpleNamespace) -> None:
    driver.nvmlDeviceGetMigMode = lambda gpu: [gpu == "GPU-b", 1]
    assert "split by MIG" in host.read_gpu("b")
    driver.nvmlDeviceGetHandleByUUID = {"MIG-b": "GPU-a", "GPU-b": "GPU-b"}.__getitem__
    assert host.read_gpu("b").name == "Alpha"


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
    assert getattr(host.read_gpu("a"), figure) == value


def test_an_error_of_the_driver_becomes_a_reason(driver: SimpleNamespace, monkeypatch) -> None:
    driver.nvmlDeviceGetHandleByIndex = failing
    assert "the driver is lost" in host.read_gpus()
    assert not driver.is_open
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml" in host.read_gpus()
