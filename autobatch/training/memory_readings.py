"""The memory of a run, read after some of its steps: a reading waits for the device."""

from __future__ import annotations

from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.base import Meter

INTERVAL = 16
"""Steps between two readings in the steady state, and steps before it that are all read."""


class MemoryReadings:
    """The memory after each step, as it was last read.

    Args:
        meter: reads it.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._steps = 0
        self._last: MemoryStats | None = None

    def after_step(self, *, is_unusual: bool) -> MemoryStats:
        """Return the memory after the next step, read anew if that is due.

        Args:
            is_unusual: whether the step ran out of memory, so that what is known no longer holds.
        """
        is_due = self._steps < INTERVAL or self._steps % INTERVAL == 0
        self._steps += 1
        if self._last is None or is_due or is_unusual:
            self._last = self._meter.stats()
        return self._last
