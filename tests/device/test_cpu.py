"""The CPU as a device: its budget, what it enforces, and how it describes itself."""

from __future__ import annotations

import pytest
import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.base import Device
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory, cpu_name

HOST = HostMemory(16 * GiB, 8 * GiB, "a made-up machine")


def test_an_asked_budget_is_taken_literally():
    assert CpuDevice(memory_budget="6GiB", memory=HOST).budget_bytes == 6 * GiB
    assert CpuDevice(memory_budget="50%", memory=HOST).budget_bytes == 8 * GiB
    assert CpuDevice(memory_budget=16 * GiB, memory=HOST).budget_bytes == 16 * GiB
    unknown = HostMemory(None, None, "this system does not report its memory")
    assert CpuDevice(memory_budget="2GiB", memory=unknown).budget_bytes == 2 * GiB


def test_the_default_budget_leaves_a_headroom():
    assert CpuDevice(memory=HOST).budget_bytes == 8 * GiB - round(1.6 * GiB)
    small = HostMemory(2 * GiB, GiB, "a small one")
    assert CpuDevice(memory=small).budget_bytes == 512 * MiB
    assert "512 MiB" in CpuDevice(memory=small).describe().budget_source


@pytest.mark.parametrize(
    ("budget", "memory", "error", "words"),
    [
        ("17GiB", HOST, InputError, r"17\.0 GiB.*16\.0 GiB"),
        ("nonsense", HOST, InputError, "nonsense"),
        (None, HostMemory(None, None, "not known"), InputError, "not known.*memory-budget"),
        ("50%", HostMemory(None, None, "not known"), InputError, "50%.*not known"),
        (None, HostMemory(2 * GiB, 512 * MiB, "full"), DoesNotFitError, "512 MiB.*512 MiB"),
    ],
)
def test_an_impossible_budget_names_both_numbers(budget, memory, error, words):
    with pytest.raises(error, match=words):
        CpuDevice(memory_budget=budget, memory=memory)


def test_a_step_over_the_budget_raises_and_the_next_one_runs():
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


def test_training_counts_nothing():
    device = CpuDevice(memory_budget=KiB, memory=HOST)
    with device.training() as meter:
        meter.count([torch.ones(10_000)])
        meter.mark("forward")
        assert torch.ones(10_000).sum() == 10_000
        assert set(meter.stats()) == {None}
        assert meter.trace() is None


def test_the_record_of_the_device():
    record = CpuDevice(memory_budget="1GiB", memory=HOST).describe()
    assert (record.kind, record.total_bytes, record.budget_bytes) == ("cpu", 16 * GiB, GiB)
    assert record.other_processes_bytes is None
    assert record.name == cpu_name()
    assert CpuDevice(memory_budget="1GiB", memory=HOST).torch_device == torch.device("cpu")
