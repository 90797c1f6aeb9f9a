"""Runs of a search, and what a replay of their events says of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from autobatch.core.records import Attempt
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable
from autobatch.rehearsal.attempt import Outcome

ENDLESS = 1 << 62
"""A size that no data has."""


class Runs:
    """Runs that came to their end, and what they say of other sizes.

    Args:
        models: each returns an empty allocator with the budget as its limit. Several differ in the order of
            the driver's segments, and runs tell which is right.
        known: programs of an earlier search, which count until two runs give others.
    """

    def __init__(self, models: Sequence[Callable[[], Allocator]], known: Sequence[Program] = ()) -> None:
        self._models = models
        self._agreed = [0] * len(models)
        """Peaks of runs, up to their error if they failed, that a replay in each model meets to the byte."""
        self._ran: dict[int, Attempt] = {}
        """Runs that fit, by size."""
        self._orders: tuple[dict[int, Trace], ...] = ({}, {})
        """Whole traces in each order of steps, by size."""
        self._fitted: list[tuple[Program, Sequence[int]]] = [(program, ()) for program in known]
        """For each order of steps a program, and the sizes of the runs of one structure that it fits."""
        self._fitting = Fitting(known, models[0]) if known else None

    @property
    def order(self) -> int:
        """The number of the model that agrees with most runs."""
        return self._agreed.index(max(self._agreed))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the step in each order that ran; empty if no two runs are alike."""
        return tuple(program for program, _ in self._fitted)

    @property
    def is_of_largest(self) -> bool:
        """True if what is replayed was fitted to the largest run that fits, or nothing else is known."""
        if not self._fitted:
            return False
        sizes = self._fitted[0][1]
        return not sizes or max(self._ran, default=0) in sizes

    def trace(self, size: int) -> Trace | None:
        """Return the events of a run that fits; None if there are none."""
        return self._orders[0].get(size)

    def add(self, outcome: Outcome) -> None:
        """Learn from a run. One that failed is whole if it broke a rule, or failed in the other order."""
        attempt = outcome.attempt
        if attempt.fits:
            self._ran[attempt.micro_batch] = attempt
        if outcome.trace is not None and len(self._models) > 1:
            for at, model in enumerate(self._models):
                said = replay(outcome.trace.canonical(), model())
                self._agreed[at] += said.peak_reserved_bytes == attempt.peak_reserved_bytes
                self._agreed[at] += said.peak_allocated_bytes == attempt.peak_allocated_bytes
        is_whole = attempt.fits or attempt.phase is None
        wholes = (is_whole or outcome.other is not None, is_whole)
        for traces, trace, whole in zip(self._orders, (outcome.trace, outcome.other), wholes, strict=True):
            if trace is not None and whole:
                traces[attempt.micro_batch] = trace.canonical()
        fitted = [_fit_alike(traces) for traces in self._orders]
        if fitted[0] is not None:
            self._fitted = [fit for fit in fitted if fit is not None]
        self._fitting = Fitting(self.programs, self._models[self.order]) if self._fitted else None

    def largest(self, cap: int, multiple: int) -> int | None:
        """Return the largest size that fits according to the replay; None if there is none."""
        with suppress(Untraceable):
            return self._fitting.largest(cap, multiple) if self._fitting else None
        return None

    def refuse(self, size: int, above: int) -> bool:
        """Return whether replays that agree to the byte with the run of a size refuse the next one.

        If runs do not tell the order of segments, replays in all orders must.
        """
        ran, most = self._ran.get(size), max(self._agreed)
        likely = [model for model, agreed in zip(self._models, self._agreed, strict=True) if agreed == most]
        if ran is None or not self._fitted:
            return False
        with suppress(Untraceable):
            return all(self._refuses(model, ran, above) for model in likely)
        return False

    def _refuses(self, new_allocator: Callable[[], Allocator], ran: Attempt, above: int) -> bool:
        size = ran.micro_batch
        said = replay(self.programs[0].at(size), new_allocator())
        agrees = said.peak_reserved_bytes == ran.peak_reserved_bytes
        if ran.peak_reserved_bytes is None:  # the allocator keeps nothing
            agrees = said.peak_allocated_bytes == ran.peak_allocated_bytes
        nexts = [program.at(above, since=size) for program in self.programs]
        return said.fits and agrees and not all(replay(trace, new_allocator()).fits for trace in nexts)

    def line(self, share: float = 1.0) -> int:
        """Return the size at which a line meets a share of the budget, `ENDLESS` if memory does not grow.

        It goes through the peaks of the two largest runs, or through that of a single one and the bytes that
        it held at its end.
        """
        budget, runs = self._models[0]().limit, sorted(self._ran.items())[-2:]
        if budget is None or not runs:
            return ENDLESS
        (less, small), (size, large) = runs[0], runs[-1]
        low, high = small.peak_reserved_bytes or 0, large.peak_reserved_bytes or 0
        if low == high:  # small runs have their first segments only
            low, high = small.peak_allocated_bytes or 0, large.peak_allocated_bytes or 0
        if less == size:
            less, trace = 0, self.trace(size)
            low = 0 if trace is None else replay(trace, CountingAllocator()).allocated_bytes
            low = low if low < high else 0
        return ENDLESS if low >= high else size + int((share * budget - high) * (size - less) / (high - low))


def _fit_alike(traces: dict[int, Trace]) -> tuple[Program, Sequence[int]] | None:
    """Fit a program to the largest traces of one structure, if there are two; return it with their sizes."""
    groups: dict[int, list[tuple[int, Trace]]] = {}
    for size, trace in sorted(traces.items(), reverse=True):
        shape = tuple((block, bytes_ == FREE) for block, bytes_ in trace.events)
        groups.setdefault(hash((shape, trace.marks)), []).insert(0, (size, trace))
    for alike in groups.values():
        # Three are a parabola; the two largest still are a line where three follow none.
        for points in (alike, alike[-2:]):
            with suppress(Untraceable, ValueError):
                return Program.fit(points), [size for size, _ in alike]
    return None
