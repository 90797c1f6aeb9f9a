"""Runs of a search, whose failure is an answer too, and what a replay of their events says of other sizes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from autobatch.core.errors import AutobatchError, UserCodeError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.core.text import error_text
from autobatch.device.allocator import Allocator
from autobatch.device.oom import loses_context
from autobatch.device.trace import Trace, replay
from autobatch.footprint.program import Fitting, Program, Untraceable, structure_of
from autobatch.rehearsal.process import ChildCrashed, SetupProcess, ThisProcess
from autobatch.rehearsal.rehearsal import Outcome, attempt


def reported(attempt: Callable[[], Outcome], progress: Progress) -> Outcome:
    """Make an attempt, once more if something else than the budget refused memory, and report it."""
    outcome = attempt()
    if outcome.attempt.is_below_budget:
        outcome = attempt()
    progress.attempted(outcome.attempt)
    return outcome


def run_attempt(process: SetupProcess, micro_batch: int, progress: Progress) -> Outcome:
    """Make an attempt, and report it; see `reported`.

    Returns:
        Its outcome, with the error if the size fails for another reason than memory. A size for which the
        host ends the child process does not fit.

    Raises:
        Exception: the input is invalid at any size, or this process has lost its GPU.
    """
    progress.doing(f"running {micro_batch:,} samples at once")
    return reported(partial(_run, process, micro_batch), progress)


def _run(process: SetupProcess, micro_batch: int) -> Outcome:
    start = time.perf_counter()
    failure: Exception
    try:
        return process.call(f"an attempt at a micro-batch of {micro_batch}", attempt, micro_batch)
    except Exception as error:
        if isinstance(error, AutobatchError) and not isinstance(error, UserCodeError | ChildCrashed):
            raise
        failure = error
    # Outside of the except block, so that nothing holds the tensors of the failed attempt.
    traceback.clear_frames(failure.__traceback__)
    if isinstance(process, ThisProcess) and loses_context(failure):
        raise failure
    is_killed = isinstance(failure, ChildCrashed) and failure.out_of_memory
    failed = Attempt(
        micro_batch=micro_batch,
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=time.perf_counter() - start,
        reason="the host ran out of memory and ended the child process"
        if is_killed
        else error_text(failure, first_line=True),
        is_error=not is_killed,
    )
    return Outcome(failed, None, error=None if is_killed else failure)


ENDLESS = 1 << 62
"""A size that no data has."""


class Runs:
    """Runs that came to their end, and what they say of other sizes.

    Programs of an earlier search count until two runs give others.
    """

    def __init__(self, new_allocator: Callable[[], Allocator], known: Sequence[Program] = ()) -> None:
        self._new_allocator = new_allocator
        self._fits: dict[int, Attempt] = {}
        """Runs that fit, by size."""
        self._traces: tuple[dict[int, Trace], ...] = ({}, {})
        """Whole traces in each order of steps, by size."""
        self._fitting = Fitting(known, new_allocator)
        self._sizes: Sequence[int] = ()
        """Sizes of the runs of one structure to which the programs were fitted; none if they were known."""

    @property
    def programs(self) -> Sequence[Program]:
        """The programs of the step in each order that ran; empty if no two runs are alike."""
        return self._fitting.orders

    @property
    def is_of_largest(self) -> bool:
        """True if what is replayed was fitted to the largest run that fits, or nothing else is known."""
        return bool(self.programs) and (not self._sizes or max(self._fits, default=0) in self._sizes)

    def trace(self, size: int) -> Trace | None:
        """Return the events of a run that fits; None if there are none."""
        return self._traces[0].get(size)

    def add(self, outcome: Outcome) -> None:
        """Learn from a run. One that failed is whole if it broke a rule, or failed in the other order."""
        attempt = outcome.attempt
        if attempt.fits:
            self._fits[attempt.micro_batch] = attempt
        is_whole = attempt.fits or attempt.phase is None
        if outcome.trace is not None and (is_whole or outcome.other is not None):
            self._traces[0][attempt.micro_batch] = outcome.trace
        if outcome.other is not None and is_whole:
            self._traces[1][attempt.micro_batch] = outcome.other
        fitted, *others = (_fit_alike(traces) for traces in self._traces)
        if fitted is not None:
            programs = [program for program, _ in (fitted, *filter(None, others))]
            self._sizes, self._fitting = fitted[1], Fitting(programs, self._new_allocator)

    def largest(self, cap: int, multiple: int) -> int | None:
        """Return the largest size that fits according to the replay; None if there is none."""
        return self._fitting.largest(cap, multiple) if self.programs else None

    def refuse(self, size: int, above: int) -> bool:
        """Return whether a replay that agrees to the byte with the run of a size refuses the next one."""
        if (ran := self._fits.get(size)) is None or not self.programs:
            return False
        said = replay(self.programs[0].at(size), self._new_allocator())
        agrees = said.peak_reserved_bytes == ran.peak_reserved_bytes
        if ran.peak_reserved_bytes is None:  # the allocator keeps nothing
            agrees = said.peak_allocated_bytes == ran.peak_allocated_bytes
        nexts = (replay(each.at(above, since=size), self._new_allocator()) for each in self.programs)
        return said.fits and agrees and not all(each.fits for each in nexts)

    def line(self, share: float = 1.0) -> int:
        """Return the size at which a line meets a share of the budget, `ENDLESS` if memory does not grow.

        It goes through the peaks of the two largest runs, or through that of a single one and the bytes that
        it held at its end.
        """
        budget, runs = self._new_allocator().limit, sorted(self._fits.items())[-2:]
        if budget is None or not runs:
            return ENDLESS
        (less, small), (size, large) = runs[0], runs[-1]
        low, high = small.peak_reserved_bytes or 0, large.peak_reserved_bytes or 0
        if low == high:  # small runs have their first segments only
            low, high = small.peak_allocated_bytes or 0, large.peak_allocated_bytes or 0
        if less == size:
            less, trace = 0, self.trace(size)
            low = 0 if trace is None else replay(trace, Allocator()).allocated_bytes
            low = low if low < high else 0
        return ENDLESS if low >= high else size + int((share * budget - high) * (size - less) / (high - low))


def _fit_alike(traces: dict[int, Trace]) -> tuple[Program, Sequence[int]] | None:
    """Fit a program to the largest traces of one structure, if there are two; return it with their sizes."""
    groups: dict[int, list[int]] = {}
    for size in sorted(traces, reverse=True):
        groups.setdefault(hash(structure_of(traces[size])), []).insert(0, size)
    for alike in groups.values():
        # Three are a parabola; the two largest still are a line where three follow none.
        for sizes in (alike, alike[-2:]) if len(alike) > 1 else ():
            with suppress(Untraceable):
                return Program.fit([(size, traces[size]) for size in sizes]), alike
    return None
