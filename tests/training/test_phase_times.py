"""Seconds of phases, with a clock and events that a test sets."""

from __future__ import annotations

import pytest

from autobatch.training.observers import PhaseTimes
from tests.support.training import make_loop, make_workload


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Event:
    """An event of a device that is ``behind`` its host by so many seconds."""

    def __init__(self, clock: Clock, behind: float) -> None:
        self._clock, self._behind = clock, behind

    def record(self) -> None:
        self.at = self._clock() + self._behind

    def query(self) -> bool:
        return self._clock() >= self.at

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def one_step(times: PhaseTimes, clock: Clock) -> None:
    times.begin(clock())
    for phase, seconds in (("data", 1), ("forward", 2), ("backward", 3), ("optimizer", 4), ("other", 5)):
        if times.is_timing:
            times.lap(phase)
        clock.now += seconds
    times.end()


def test_the_phases_of_a_step_are_shared_out_over_all_steps() -> None:
    clock = Clock()
    times = PhaseTimes(clock)
    one_step(times, clock)
    with times.between_steps("checkpoint"):
        clock.now += 7
    assert times.totals(30.0) == pytest.approx(
        {"other": 10, "step": 8, "checkpoint": 7, "backward": 6, "forward": 4, "data": 2}
    )
    assert next(iter(times.totals(30.0))) == "other"


def test_events_are_read_only_after_they_passed() -> None:
    clock = Clock()
    times = PhaseTimes(clock, lambda: Event(clock, behind=100.0))
    one_step(times, clock)
    # The device is behind: the next step is not timed, and nobody waits.
    times.begin(clock())
    assert not times.is_timing
    assert times.totals(15.0) == {}
    clock.now += 1000
    assert times.totals(15.0) == pytest.approx(
        {"other": 5, "step": 4, "backward": 3, "forward": 2, "data": 1}
    )


def test_a_step_that_ran_out_of_memory_does_not_count() -> None:
    clock = Clock()
    times = PhaseTimes(clock)
    times.begin(0.0)
    clock.now = 5.0
    times.drop()
    times.end()
    assert times.totals(1.0) == {}


def test_a_run_on_the_cpu_times_its_phases() -> None:
    loop = make_loop(make_workload(), steps=3)
    records = list(loop.run())
    found = loop.times.totals(sum(record.seconds for record in records))
    assert set(found) == {"data", "forward", "backward", "step", "other"}
    assert sum(found.values()) == pytest.approx(sum(record.seconds for record in records))
