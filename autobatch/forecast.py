"""Predicting the largest micro-batch from what has run.

Best is the replay of allocation events that are exact polynomials in the micro-batch; where a device records
none, or their structure changes with the size, the line through the two largest peaks gives a next guess, and
nothing is ever certified by it (a line through peaks is off by up to 27 %: memory is a maximum over phases).
"""

from __future__ import annotations

from collections.abc import Callable

from autobatch.attempt import Outcome
from autobatch.footprint.allocator import Allocator
from autobatch.footprint.program import Program, Trace, Untraceable, largest, replay
from autobatch.records import Attempt


class ReplayForecast:
    """Replays the events of attempts at other sizes.

    Args:
        new_allocator: an empty allocator with the device's budget.
        prior: a program predicted without running anything, if there is one.
    """

    def __init__(self, new_allocator: Callable[[], Allocator], prior: Program | None = None) -> None:
        self._new_allocator = new_allocator
        self._program = prior
        self._points: list[tuple[int, Trace]] = []
        self._confirmed = False
        self._peaks = PeakForecast()

    def learn(self, outcome: Outcome) -> None:
        """Take in an attempt: check the program against it, and fit it anew where it was wrong."""
        self._peaks.learn(outcome)
        if outcome.trace is None:
            return
        size = outcome.attempt.micro_batch
        self._points.append((size, outcome.trace))
        if self._program is not None and self._program.agrees_with(size, outcome.trace):
            self._confirmed = True
            return
        self._confirmed = False
        self._program = self._fit()

    def largest(self, cap: int) -> int | None:
        """See `autobatch.search.Forecast`."""
        if self._program is None:
            return self._peaks.largest(cap, self._new_allocator().limit)
        return largest(self._program, self._new_allocator, cap) or 0

    def certifies(self, micro_batch: int) -> bool:
        """See `autobatch.search.Forecast`: only a program that a further run has agreed with may certify."""
        if self._program is None or not self._confirmed:
            return False
        return not replay(self._program.at(micro_batch + 1), self._new_allocator()).fits

    def _fit(self) -> Program | None:
        """Fit through the latest points: a line through two, a parabola through three where no line holds."""
        for count in (2, 3):
            if len(self._points) >= count:
                try:
                    program = Program.fit(sorted(self._points, key=lambda point: point[0])[-count:])
                except Untraceable:
                    continue
                if all(program.agrees_with(size, trace) for size, trace in self._points[-3:]):
                    return program
        return None


class PeakForecast:
    """A straight line through the peaks of the two largest sizes that fitted."""

    def __init__(self) -> None:
        self._fitting: dict[int, int] = {}

    def learn(self, outcome: Outcome) -> None:
        """Take in an attempt that fitted."""
        peak = peak_bytes(outcome.attempt)
        if outcome.attempt.fits and peak is not None:
            self._fitting[outcome.attempt.micro_batch] = peak

    def largest(self, cap: int, budget_bytes: int | None) -> int | None:
        """Where the line meets the budget; ``None`` before two sizes ran, or where memory does not grow."""
        if len(self._fitting) < 2 or budget_bytes is None:
            return None
        (small, low), (large, high) = sorted(self._fitting.items())[-2:]
        if high <= low:
            return None
        return min(cap, large + (budget_bytes - high) * (large - small) // (high - low))


def peak_bytes(attempt: Attempt) -> int | None:
    """What is held against the budget: peak reserved, or peak allocated where nothing is cached."""
    if attempt.peak_reserved_bytes is not None:
        return attempt.peak_reserved_bytes
    return attempt.peak_allocated_bytes
