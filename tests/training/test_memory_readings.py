"""The steps after which memory is read."""

from __future__ import annotations

from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.cpu import SilentMeter
from autobatch.training.memory_readings import INTERVAL, MemoryReadings


class Numbered(SilentMeter):
    """A meter whose readings are numbered."""

    readings = 0

    def stats(self) -> MemoryStats:
        self.readings += 1
        return MemoryStats(self.readings, None, None, None, None)


def test_all_first_steps_are_read_then_one_of_many_and_each_unusual_one() -> None:
    readings = MemoryReadings(Numbered())
    unusual = 2 * INTERVAL + 3
    read = [readings.after_step(is_unusual=step == unusual).allocated_bytes for step in range(4 * INTERVAL)]
    fresh = [step for step, one in enumerate(read) if step == 0 or one != read[step - 1]]
    assert fresh == [*range(INTERVAL + 1), 2 * INTERVAL, unusual, 3 * INTERVAL]
