"""Runs of a search, and what a replay of their events says of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from autobatch.core.records import Attempt
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.alignment import Sized, align
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable
from autobatch.rehearsal.attempt import Outcome

ENDLESS = 1 << 62
"""A size that no data has."""


class Fit(NamedTuple):
    """A program, and the sizes of the runs that it was fitted to."""

    program: Program
    sizes: tuple[int, ...] = ()
    is_aligned: bool = False
    """True if the runs differ in a few blocks: it tells what may fit, and proves nothing."""


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
        self._fits = self._known = [Fit(program) for program in known]
        """What the largest runs give, for each order that has such."""
        self._exact = self._known
        """The same of runs of one structure, which may prove something."""
        self._fitting = Fitting(self.programs, models[0]) if known else None

    @property
    def order(self) -> int:
        """The number of the model that agrees with most runs."""
        return self._agreed.index(max(self._agreed))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the step in each order that ran; empty if no two runs are alike."""
        return tuple(fit.program for fit in self._fits)

    @property
    def is_aligned(self) -> bool:
        """True if what is replayed was fitted to runs that differ in a few blocks."""
        return any(fit.is_aligned for fit in self._fits)

    @property
    def is_of_largest(self) -> bool:
        """True if what is replayed was fitted to the largest run that fits, or nothing else is known."""
        if not self._fits or self._fits is self._known:
            return bool(self._fits)
        return max(self._ran, default=0) in self._fits[0].sizes

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
        exact = [_fit_alike(traces) for traces in self._orders]
        fits = [_fit_largest(traces, fit) for traces, fit in zip(self._orders, exact, strict=True)]
        self._fits = [fit for fit in fits if fit is not None] or self._known
        if exact[0] is not None:
            self._exact = [fit for fit in exact if fit is not None]
        self._fitting = Fitting(self.programs, self._models[self.order]) if self._fits else None

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
        with suppress(Untraceable):
            return ran is not None and bool(self._exact) and all(self._refuses(m, ran, above) for m in likely)
        return False

    def _refuses(self, new_allocator: Callable[[], Allocator], ran: Attempt, above: int) -> bool:
        size = ran.micro_batch
        said = replay(self._exact[0].program.at(size), new_allocator())
        agrees = said.peak_reserved_bytes == ran.peak_reserved_bytes
        if ran.peak_reserved_bytes is None:  # the allocator keeps nothing
            agrees = said.peak_allocated_bytes == ran.peak_allocated_bytes
        nexts = [fit.program.at(above, since=size) for fit in self._exact]
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


def _fit_alike(traces: dict[int, Trace]) -> Fit | None:
    """Fit a program to the largest traces of one structure; None if there are no two."""
    groups: dict[int, list[tuple[int, Trace]]] = {}
    for size, trace in sorted(traces.items(), reverse=True):
        shape = tuple((block, bytes_ == FREE) for block, bytes_ in trace.events)
        groups.setdefault(hash((shape, trace.marks)), []).insert(0, (size, trace))
    for alike in groups.values():
        # Three are a parabola; the two largest still are a line where three follow none.
        for points in (alike, alike[-2:]):
            with suppress(Untraceable, ValueError):
                return Fit(Program.fit(points), tuple(size for size, _ in alike))
    return None


def _fit_largest(traces: dict[int, Trace], exact: Fit | None) -> Fit | None:
    """Fit a program to the two largest traces, although they may differ in a few blocks.

    Return that of `_fit_alike` if the largest is among its traces, or if the two largest part too far.
    """
    two = sorted(traces.items())[-2:]
    if len(two) > 1 and (exact is None or two[-1][0] not in exact.sizes):
        with suppress(Untraceable):
            aligned = align([Sized(size, trace) for size, trace in two])
            return Fit(aligned.program, tuple(size for size, _ in two), is_aligned=True)
    return exact
