"""A simulated GPU: CUDA's arithmetic and CUDA's messages, with tensors on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.allocator.trace import replay
from autobatch.device.oom import is_fragmented
from autobatch.device.profiles import HardwareProfile
from autobatch.device.simulated import SimulatedDevice
from tests.support.hardware import a_figure, a_profile


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
        assert text.startswith(
            "CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 24.00 GiB"
        )
        assert "64.00 MiB allowed" in text
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
