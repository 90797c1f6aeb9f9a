"""Fixtures of the tests of tuning."""

from __future__ import annotations

import pytest

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.simulated import SimulatedDevice


@pytest.fixture
def allocators(monkeypatch: pytest.MonkeyPatch) -> list[CachingAllocator]:
    """Collect every allocator that a simulated GPU makes."""
    made: list[CachingAllocator] = []
    new = SimulatedDevice.new_allocator

    def collect(self: SimulatedDevice) -> CachingAllocator:
        made.append(new(self))
        return made[-1]

    monkeypatch.setattr(SimulatedDevice, "new_allocator", collect)
    return made
