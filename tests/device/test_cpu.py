"""The CPU as a device: its budget, what it enforces, and how it describes itself."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory

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
        (16 * GiB + 1, HOST, InputError, "16"),
        ("nonsense", HOST, InputError, "nonsense"),
        (None, UNKNOWN, InputError, "not known.*memory-budget"),
        ("50%", UNKNOWN, InputError, "50%.*not known"),
        (None, FULL, DoesNotFitError, r"512 MiB available \(full\) - 512 MiB headroom.*--memory-budget"),
    ],
)
def test_an_impossible_budget_names_both_numbers(budget, memory, error, words):
    with pytest.raises(error, match=words):
        CpuDevice(memory_budget=budget, memory=memory)


@pytest.mark.parametrize(
    ("supported", "precisions"),
    [
        ("avx2", ("fp32",)),
        ("avx512_bf16", ("fp32", "bf16")),
        ("amx_tile", ("fp32", "bf16")),
    ],
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


def test_training_counts_nothing():
    device = CpuDevice(memory_budget=KiB, memory=HOST)
    with device.training() as meter:
        meter.count([torch.ones(10_000)])
        meter.mark("forward")
        assert torch.ones(10_000).sum() == 10_000
        assert set(meter.stats()) == {None}
        assert meter.trace() is None
