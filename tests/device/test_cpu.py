"""The CPU as a device and a GPU that is simulated on it: their budgets, and what they enforce."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.allocator.trace import replay
from autobatch.device.cpu import CpuDevice, SimulatedDevice
from autobatch.device.host import HostMemory
from autobatch.device.oom import is_fragmented
from autobatch.device.profiles import HardwareProfile
from tests.support.hardware import a_figure, a_profile

HOST = HostMemory(16 * GiB, 8 * GiB, "a made-up machine")


UNKNOWN = HostMemory(None, None, "not known")
FULL = HostMemory(2 * GiB, 512 * MiB, "full")


@pytest.mark.parametrize(
    ("asked", "memory", "budget", "source"),
    [
        ("6GiB", HOST, 6 * GiB, "as set: 6GiB"),
        ("50%", HOST, 8 * GiB, "as set: 50%"),
        (16 * GiB, HOST, 16 * GiB, f"as set: {16 * GiB}"),
        ("2GiB", UNKNOWN, 2 * GiB, "as set: 2GiB"),
        (
            None,
            HOST,
            8 * GiB - round(1.6 * GiB),
            "8.00 GiB available (a made-up machine) - 1.60 GiB headroom, 10% of the total",
        ),
        (
            None,
            HostMemory(2 * GiB, GiB, "small"),
            512 * MiB,
            "1.00 GiB available (small) - 512 MiB headroom, the least",
        ),
        (None, FULL._replace(available_bytes=512 * MiB + 1), 1, None),
    ],
)
def test_the_budget_is_as_asked_else_what_is_available_less_a_headroom(asked, memory, budget, source):
    record = CpuDevice(memory_budget=asked, memory=memory).describe()
    assert record.budget_bytes == budget
    assert source in (None, record.budget_source)


@pytest.mark.parametrize(
    ("budget", "memory", "error", "words"),
    [
        ("17GiB", HOST, InputError, r"17\.0 GiB \(17GiB\), but this machine has 16\.0 GiB"),
        ("nonsense", HOST, InputError, "nonsense"),
        (None, UNKNOWN, InputError, "not known.*memory-budget"),
        ("50%", UNKNOWN, InputError, "not known.*50%"),
        (None, FULL, DoesNotFitError, r"512 MiB available \(full\) - 512 MiB headroom.*--memory-budget"),
    ],
)
def test_an_impossible_budget_names_both_numbers(budget, memory, error, words):
    with pytest.raises(error, match=words):
        CpuDevice(memory_budget=budget, memory=memory)


@pytest.mark.parametrize(
    ("supported", "precisions"),
    [("avx2", ("fp32",)), ("avx512_bf16", ("fp32", "bf16")), ("amx_tile", ("fp32", "bf16"))],
)
def test_bf16_is_a_choice_on_cpus_that_compute_in_it(supported, precisions, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {supported: True})
    assert CpuDevice(memory_budget="1GiB").native_precisions() == precisions


def test_the_default_optimizer_steps_one_parameter_at_a_time():
    """Then torch's lists are another choice; the oracle is torch's own rule for its default."""
    rules = importlib.import_module("torch.optim.optimizer")
    parameter = torch.nn.Parameter(torch.zeros(3))
    _, foreach = rules._default_to_fused_or_foreach([parameter], False, False)
    device = CpuDevice(memory_budget="1GiB")
    assert ("foreach" in device.optimizer_implementations()) is not foreach
    assert device.compute_capability is None


def test_a_step_over_the_budget_raises_and_the_next_one_runs():
    device: Any = CpuDevice(memory_budget=64 * KiB, memory=HOST)
    with device.enforced() as meter:
        x = torch.ones(1024)
        message = ""
        try:
            torch.ones(1024, 64).exp()
        except torch.OutOfMemoryError as error:
            message = str(error)
        assert message == (
            "CPU out of memory. Tried to allocate 256 KiB. 64.0 KiB allowed, of which 60.0 KiB is free; "
            "4.00 KiB is allocated by PyTorch"
        )
        stats = meter.stats()
        assert stats.allocated_bytes == x.nbytes
        assert stats.reserved_bytes is stats.peak_reserved_bytes is stats.retries is None
        assert device.refuses(stats) is None
        assert meter.trace().events == ((0, 4096),)
    device.release()
    device.synchronize()


def test_training_counts_nothing():
    device = CpuDevice(memory_budget=KiB, memory=HOST)
    with device.training() as meter:
        meter.count([torch.ones(10_000)])
        meter.mark("forward")
        assert torch.ones(10_000).sum() == 10_000
        assert set(meter.stats()) == {None}
        assert meter.trace() is None


def gpu(*, total_bytes: int = 24 * GiB, context_bytes: int | None = 256 * MiB) -> HardwareProfile:
    context = None if context_bytes is None else a_figure(context_bytes)
    return a_profile(title="Made-up 9000", total=a_figure(total_bytes), context=context)


def test_budget_is_what_the_context_and_a_headroom_leave():
    assert SimulatedDevice(gpu()).budget_bytes == 24 * GiB - 256 * MiB - 24 * GiB * 5 // 100
    assert SimulatedDevice(gpu(total_bytes=4 * GiB)).budget_bytes == 4 * GiB - 256 * MiB - 512 * MiB
    unknown = SimulatedDevice(gpu(total_bytes=4 * GiB, context_bytes=None))
    assert unknown.budget_bytes == 4 * GiB - 512 * MiB - 512 * MiB


def test_an_asked_budget_is_taken_literally():
    assert SimulatedDevice(gpu(), "1GiB").budget_bytes == GiB
    assert SimulatedDevice(gpu(), "50%").budget_bytes == 12 * GiB
    with pytest.raises(InputError, match=r"25\.0 GiB.*24\.0 GiB"):
        SimulatedDevice(gpu(), "25GiB")
    with pytest.raises(DoesNotFitError, match="768 MiB"):
        SimulatedDevice(gpu(total_bytes=768 * MiB))


def test_segments_count_against_the_budget():
    device: Any = SimulatedDevice(gpu(), 64 * MiB)
    with device.enforced() as meter:
        small = torch.zeros(1)
        large = torch.zeros(2 * MiB // 4)
        stats = meter.stats()
        assert stats.allocated_bytes == 512 + large.nbytes
        assert stats.reserved_bytes == stats.peak_reserved_bytes == 22 * MiB
        assert small.item() == 0
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(50 * MiB // 4)  # 64 - 22 = 42 MiB are left
        text = str(caught.value)
        assert text.startswith("CUDA out of memory. Tried to allocate 50.0 MiB. 64.0 MiB allowed")
        assert text.endswith("and 20.0 MiB is reserved by PyTorch but unallocated")
        assert not is_fragmented(caught.value)
    trace = meter.trace()
    assert replay(trace, device.new_allocator()).peak_reserved_bytes == 22 * MiB


def test_cached_segments_are_reused_and_freed_in_training_whose_limit_is_on():
    device = SimulatedDevice(gpu(), 64 * MiB)
    with device.training() as meter:
        for _ in range(3):
            torch.zeros(40 * MiB // 4)
        assert (meter.stats().allocated_bytes, meter.stats().reserved_bytes) == (0, 40 * MiB)
        torch.zeros(60 * MiB // 4)
        stats = meter.stats()
        assert (stats.reserved_bytes, stats.retries) == (60 * MiB, 1)
        assert device.refuses(stats) is None
        device.release()
        assert meter.stats().reserved_bytes == 0
        assert meter.trace() is None
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(65 * MiB, dtype=torch.uint8)
    with device.enforced() as meter:
        assert meter.stats().peak_reserved_bytes == 0
    device.release()


def test_the_text_tells_fragmentation_as_that_of_cuda():
    device = SimulatedDevice(gpu(), 64 * MiB)
    with device.training():
        held = [torch.zeros(1280 * 1024, dtype=torch.uint8) for _ in range(48)]
        del held[::2]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(15 * MiB, dtype=torch.uint8)
    assert is_fragmented(caught.value)
