"""The host as a device: what it offers, from made-up /proc and cgroup trees, and what it enforces."""

from __future__ import annotations

import pytest
import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.base import Device
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory, cpu_name, host_memory

HOST = HostMemory(16 * GiB, 8 * GiB, "a made-up machine")


@pytest.fixture
def tree(tmp_path):
    """Writes files below a directory that stands for the file system."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return host_memory(proc=tmp_path / "proc", cgroups=tmp_path / "cg")

    return write


MEMINFO = {"proc/meminfo": f"MemTotal:  {16 * MiB} kB\nMemFree: 1 kB\nMemAvailable:  {8 * MiB} kB\n"}
"""16 GiB in all, 8 GiB available."""


def test_a_machine_without_control_groups(tree):
    assert tree(MEMINFO)[:2] == (16 * GiB, 8 * GiB)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # Version 2, in the group's own namespace: the root is the group.
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": f"{4 * GiB}\n", "cg/memory.current": f"{GiB}\n"},
            (4 * GiB, 3 * GiB),
        ),
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
        # Version 1, beside other controllers; a path of the host that is not mounted here.
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
                "cg/memory/memory.limit_in_bytes": f"{2 * GiB}\n",
                "cg/memory/memory.usage_in_bytes": f"{GiB}\n",
                "cg/memory/memory.stat": f"total_inactive_file {512 * MiB}\n",
            },
            (2 * GiB, 1536 * MiB),
        ),
        # Version 1 writes "unlimited" as a huge number.
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/memory/memory.usage_in_bytes": "5\n",
            },
            (16 * GiB, 8 * GiB),
        ),
        # Over its limit.
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": "1000\n", "cg/memory.current": "2000\n"},
            (1000, 0),
        ),
    ],
)
def test_the_lower_of_the_machine_and_its_control_groups(tree, files, expected):
    assert tree({**MEMINFO, **files})[:2] == expected


def test_nothing_to_read(tree):
    """Then the C library is asked; whatever it says makes sense."""
    memory = tree({})
    assert memory.total_bytes is None or memory.total_bytes > 64 * MiB
    assert memory.available_bytes is None or 0 < memory.available_bytes <= memory.total_bytes


def test_this_machine():
    memory = host_memory()
    assert memory.total_bytes is None or memory.total_bytes > 64 * MiB
    assert cpu_name()


def test_cpu_name(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Made-up 9000 @ 3: GHz\n")
    assert cpu_name(proc=tmp_path) == "Made-up 9000 @ 3: GHz"
    assert cpu_name(proc=tmp_path / "none")


def test_budget_asked_for_is_taken_at_its_word():
    assert CpuDevice(memory_budget="6GiB", memory=HOST).budget_bytes == 6 * GiB
    assert CpuDevice(memory_budget="50%", memory=HOST).budget_bytes == 8 * GiB
    assert CpuDevice(memory_budget=16 * GiB, memory=HOST).budget_bytes == 16 * GiB
    unknown = HostMemory(None, None, "this system does not tell its memory")
    assert CpuDevice(memory_budget="2GiB", memory=unknown).budget_bytes == 2 * GiB


def test_budget_by_itself_leaves_a_headroom():
    assert CpuDevice(memory=HOST).budget_bytes == 8 * GiB - round(1.6 * GiB)
    small = HostMemory(2 * GiB, GiB, "a small one")
    assert CpuDevice(memory=small).budget_bytes == 512 * MiB
    assert "512 MiB" in CpuDevice(memory=small).describe().budget_source


@pytest.mark.parametrize(
    ("budget", "memory", "error", "words"),
    [
        ("17GiB", HOST, InputError, r"17\.0 GiB.*16\.0 GiB"),
        ("nonsense", HOST, InputError, "nonsense"),
        (None, HostMemory(None, None, "not told"), InputError, "not told.*memory-budget"),
        ("50%", HostMemory(None, None, "not told"), InputError, "50%.*not told"),
        (None, HostMemory(2 * GiB, 512 * MiB, "full"), DoesNotFitError, "512 MiB.*512 MiB"),
    ],
)
def test_what_cannot_be_says_both_numbers(budget, memory, error, words):
    with pytest.raises(error, match=words):
        CpuDevice(memory_budget=budget, memory=memory)


def test_enforced_raises_and_recovers():
    device: Device = CpuDevice(memory_budget=64 * KiB, memory=HOST)
    with device.enforced() as meter:
        x = torch.ones(1024)
        message = ""
        try:
            torch.ones(1024, 64).exp()
        except torch.OutOfMemoryError as error:
            message = str(error)
        assert "256 KiB requested" in message
        assert "60.0 KiB free" in message
        assert "tensors hold 4.00 KiB of the memory budget of 64.0 KiB" in message
        stats = meter.stats()
        assert stats.allocated_bytes == x.nbytes
        assert stats.reserved_bytes is stats.peak_reserved_bytes is stats.retries is None
        assert device.refuses(stats) is None
        assert meter.trace().events == ((0, 4096),)
    device.release()
    device.synchronize()


def test_training_counts_nothing_and_says_so():
    device = CpuDevice(memory_budget=KiB, memory=HOST)
    with device.training() as meter:
        meter.count([torch.ones(10_000)])
        meter.mark("forward")
        assert torch.ones(10_000).sum() == 10_000
        assert set(meter.stats()) == {None}
        assert meter.trace() is None


def test_describes_itself():
    record = CpuDevice(memory_budget="1GiB", memory=HOST).describe()
    assert (record.kind, record.total_bytes, record.budget_bytes) == ("cpu", 16 * GiB, GiB)
    assert record.other_processes_bytes is None
    assert record.name == cpu_name()
    assert CpuDevice(memory_budget="1GiB", memory=HOST).torch_device == torch.device("cpu")
