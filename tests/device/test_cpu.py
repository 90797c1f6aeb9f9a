"""The CPU as a device and a GPU that is simulated on it: their budgets, and what they enforce."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.allocator import CachingAllocator
from autobatch.device.cpu import CpuDevice, SimulatedDevice
from autobatch.device.host import HostMemory
from autobatch.device.profiles import load_profile
from autobatch.device.trace import replay

HOST = HostMemory(16 * GiB, 8 * GiB, "a made-up machine")
UNKNOWN = HostMemory(None, None, "not known")
FULL = HostMemory(2 * GiB, 512 * MiB, "full")


@pytest.mark.parametrize(
    ("asked", "memory", "budget", "source"),
    [
        ("6GiB", HOST, 6 * GiB, "as set: 6GiB"),
        ("50%", HOST, 8 * GiB, "as set: 50%"),
        ("2GiB", UNKNOWN, 2 * GiB, "as set: 2GiB"),
        (None, HOST, 8 * GiB - round(1.6 * GiB), "(a made-up machine) - 1.60 GiB headroom, 10% of the total"),
        (None, HostMemory(2 * GiB, GiB, "small"), 512 * MiB, "(small) - 512 MiB headroom, the least"),
    ],
)
def test_the_budget_is_as_asked_else_what_is_available_less_a_headroom(asked, memory, budget, source):
    record = CpuDevice(memory, asked).describe()
    assert record.budget_bytes == budget
    assert source in record.budget_source


@pytest.mark.parametrize(
    ("budget", "memory", "error", "words"),
    [
        ("17GiB", HOST, InputError, r"17\.0 GiB \(17GiB\), but this machine has 16\.0 GiB"),
        (None, UNKNOWN, InputError, "not known.*memory-budget"),
        ("50%", UNKNOWN, InputError, "not known.*50%"),
        (None, FULL, DoesNotFitError, r"512 MiB available \(full\) - 512 MiB headroom.*--memory-budget"),
    ],
)
def test_an_impossible_budget_names_both_numbers(budget, memory, error, words):
    with pytest.raises(error, match=words):
        CpuDevice(memory, budget)


def test_a_step_over_the_budget_raises_and_training_counts_nothing():
    device: Any = CpuDevice(HOST, 64 * KiB)
    with device.session(is_probe=True) as meter:
        x = torch.ones(1024)
        figures = r"Tried to allocate 256 KiB\. 64\.0 KiB allowed, of which 60\.0 KiB is free; 4\.00 KiB is"
        with pytest.raises(torch.OutOfMemoryError, match=f"^CPU out of memory. {figures}"):
            torch.ones(1024, 64).exp()
        stats = meter.stats()
        assert stats.allocated_bytes == x.nbytes
        assert stats.reserved_bytes is stats.peak_reserved_bytes is stats.retries is None
        assert meter.trace().events == ((0, 4096),)
    with device.session(is_probe=False) as meter:
        meter.count([torch.ones(100_000)])
        assert torch.ones(100_000).sum() == 100_000
        assert set(meter.stats()) == {None}
        assert meter.trace() is None


def simulated(budget: str | None = "64MiB", *, total_bytes: int = 24 * GiB) -> SimulatedDevice:
    known, change = load_profile("rtx-3090"), msgspec.structs.replace
    total, context = change(known.total, value=total_bytes), change(known.total, value=256 * MiB)
    return SimulatedDevice(change(known, total=total, context=context), budget)


def test_the_budget_of_a_simulated_gpu_is_what_its_context_and_a_headroom_leave():
    assert simulated(None).budget_bytes == 24 * GiB - 256 * MiB - 24 * GiB * 5 // 100
    assert simulated(None, total_bytes=4 * GiB).budget_bytes == 4 * GiB - 256 * MiB - 512 * MiB
    assert simulated("50%").budget_bytes == 12 * GiB
    with pytest.raises(InputError, match=r"25\.0 GiB.*24\.0 GiB"):
        simulated("25GiB")
    with pytest.raises(DoesNotFitError, match="768 MiB"):
        simulated(None, total_bytes=768 * MiB)


def test_segments_of_a_simulated_gpu_count_against_the_budget():
    device: Any = simulated()
    with device.session(is_probe=True) as meter:
        held = torch.zeros(1), torch.zeros(2 * MiB // 4)
        assert meter.stats().allocated_bytes == 512 + held[1].nbytes
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA .* allocate 50\.0 MiB\. 64\.0 MiB allowed"):
            torch.zeros(50 * MiB // 4)  # 64 - 22 = 42 MiB are left
    assert replay(meter.trace(), CachingAllocator()).peak_reserved_bytes == 22 * MiB
