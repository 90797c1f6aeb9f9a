"""The search for the largest micro-batch that fits: it measures small runs, replays them, and confirms.

    4 samples ──► 12, or ¾ of what a line says ──► replay of both ──► m, the run that confirms
    kernels of large sizes are others: ¾, then 9⁄10 of the line ──► replay of these ──► m

That m + 1 does not fit is proven by a run, by a replay that agrees with the run at m to the byte, or because
m is the cap. This module knows no device and no model: a size goes in, an `Outcome` comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from autobatch.core.largest import Bracket, most_asked, told_apart
from autobatch.core.records import Attempt, UpperBoundBy
from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable
from autobatch.rehearsal.attempt import Outcome

FIRST = 4
"""The first size: smaller ones are special cases for many kernels."""
SECOND = 12
"""The second size, if a line through the first run leaves room for it."""
SHARES = (0.75, 0.9)
"""Shares of a line at which large sizes run that have no structure in common with smaller ones."""
REACH = 2
"""Ratio of the largest size in question to a guess. Larger sizes are in question once that one fits."""
NEAR = 16
"""A guess that a run has confirmed leaves one part in this many of it in question, above it."""
NEAR_BY = 8
"""Sizes between two runs from which on the middle is asked for in place of a guess that a run has refuted."""


class Found(NamedTuple):
    """Result of a search."""

    micro_batch: int
    """The largest that ran and fits; 0 if none did."""
    upper_bound_by: UpperBoundBy | None
    """Proof that the next size does not fit, or ``error`` if it fails for another reason than memory; None if
    the search was stopped before there was one."""
    predicted: int | None
    """The first answer of a replay; None if there was none."""
    attempts: list[Attempt]
    stopped_by: str | None
    """``interrupt``, or what ``stopped`` returned; None if the search ran to its end."""
    programs: tuple[Program, ...] = ()
    """The steps at any size, in each order that ran; empty if no two runs have the same structure."""


def find_largest(
    run: Callable[[int], Outcome],
    *,
    cap: int,
    new_allocator: Callable[[], Allocator],
    multiple: int = 1,
    guess: int | None = None,
    known: Sequence[Program] = (),
    first: int = FIRST,
    stopped: Callable[[], str | None] = lambda: None,
) -> Found:
    """Find the largest micro-batch that fits.

    With s sizes in question, at most log2(s) + 3 run, and at most half of log2(s) + 2 do not fit, whatever
    fits and whatever the runs record; see `autobatch.core.largest.Bracket`. In question are the sizes up to
    `REACH` times a guess, rounded up to a power of two. If the largest of them fits, larger ones are in
    question, with a bound of their own.

    Args:
        run: makes an attempt, and returns the error of one that fails for another reason than memory.
        cap: largest size of the search, at least ``multiple``.
        new_allocator: returns an empty model of the device's allocator, limited to the budget.
        multiple: the number whose multiples run.
        guess: the likely answer, which runs first; None if nothing is known.
        known: programs of the step that came with the guess; a run that agrees with them ends the search.
        first: the first size without a guess.
        stopped: asked before each run once a size fits; a reason ends the search.

    Returns:
        The result. A ``KeyboardInterrupt`` in ``run`` ends the search, too.

    Raises:
        Exception: the error of the smallest size, if nothing fits for another reason than memory.
    """
    search = _Search(run, cap // multiple, multiple, stopped, Runs(new_allocator, known))
    stopped_by = None
    try:
        search.begin(first, guess)
        search.find()
    except _Stopped as reason:
        stopped_by = str(reason)
    except KeyboardInterrupt:
        stopped_by = "interrupt"
    low = search.low * multiple
    by = search.proof() if low and not stopped_by else None
    return Found(low, by, search.predicted, search.attempts, stopped_by, search.runs.programs)


class _Stopped(Exception):  # noqa: N818 - the end of a search is no fault
    """The search ends with what it has."""


@dataclass
class _Search:
    """The state of a search. Sizes are counted in multiples."""

    run: Callable[[int], Outcome]
    cap: int
    multiple: int
    stopped: Callable[[], str | None]
    runs: Runs
    low: int = 0
    """The largest size that ran and fits."""
    refused: dict[int, UpperBoundBy] = field(default_factory=dict)
    """The proof for each size that does not fit."""
    attempts: list[Attempt] = field(default_factory=list)
    predicted: int | None = None
    """The first answer of a replay, in samples."""

    @property
    def high(self) -> int:
        """The least size that does not fit above the largest that does, or one above the cap."""
        return min((size for size in self.refused if size > self.low), default=self.cap + 1)

    def begin(self, first: int, guess: int | None) -> None:
        """Run two small sizes and what their replay says, or large ones if the small ones are unlike."""
        if (guess is not None and self.fits(self.units(guess))) or not self.fits_between(first):
            return
        line = self.runs.line() or self.cap * self.multiple
        self.fits_between(SECOND if line >= SECOND / SHARES[0] else SHARES[0] * line)
        self.predicted = self.runs.largest(self.cap * self.multiple, self.multiple)
        if self.predicted is not None:
            self.fits_between(self.predicted)
            return
        for share in SHARES:
            self.fits_between(share * (self.runs.line() or 0))

    def fits_between(self, size: float) -> bool:
        """Run a size, in samples, if it is above the largest that fits and below the least that does not."""
        asked = self.units(int(size))
        return self.low < asked < self.high and self.fits(asked)

    def find(self) -> None:
        """Ask for sizes between one that fits and one that does not, until the next size is refused."""
        bracket = None
        while not self.proof():
            if bracket is None:
                bracket = self.bracket([attempt.fits for attempt in self.attempts])
            elif not bracket.is_open:
                bracket = self.bracket([])
            size = bracket.nearest(self.guess(bracket.low, bracket.high))
            bracket = bracket.after(size, self.fits(size))

    def bracket(self, spent: Sequence[bool]) -> Bracket:
        """Return the sizes in question, and the allowance of their bound less the runs that are spent."""
        guess = max(self.guess(self.low, self.cap + 1), 1)
        # A power of two, so that the allowance lets a guess run after two small sizes.
        top = 1 << (REACH * guess - 1).bit_length()
        if guess <= self.low and spent:  # a run has confirmed it, so that little more is in question
            top = self.low + self.low // NEAR + 1
        top = min(self.cap, top)
        asked, failed = most_asked(top)
        asked, failed = max(asked - len(spent), 1), max(failed - spent.count(False), 1)
        return Bracket(self.low, min(self.high, top + 1, self.low + told_apart(asked, failed)), asked, failed)

    def proof(self) -> UpperBoundBy | None:
        """Return the proof that the size after the largest does not fit; None if there is none yet."""
        if self.low == self.cap:
            return "cap"
        above = self.low + 1
        if above not in self.refused and self.runs.refuse(self.low * self.multiple, above * self.multiple):
            self.refused[above] = "replay"
        return self.refused.get(above)

    def fits(self, size: int) -> bool:
        """Run a size, and note what it shows."""
        reason = self.stopped() if self.low else None
        if reason:
            raise _Stopped(reason)
        outcome = self.run(size * self.multiple)
        self.attempts.append(outcome.attempt)
        if outcome.error is not None:
            if size == 1:
                raise outcome.error
            self.refused[size] = "error"
            return False
        self.runs.add(outcome)
        if outcome.attempt.fits:
            self.low = max(self.low, size)
        else:
            self.refused[size] = "run"
        return outcome.attempt.fits

    def guess(self, low: int, high: int) -> int:
        """Return the likely largest size between two."""
        middle = (low + high) // 2
        replayed = self.runs.largest(self.cap * self.multiple, self.multiple)
        if replayed is not None:
            self.predicted = self.predicted or replayed
            size = replayed // self.multiple
            # A guess that a failed run refutes teaches nothing near that run.
            if self.runs.is_of_largest and low <= size:
                return size if size < high or high - low <= NEAR_BY else middle
            if size == low:
                return size
        line = self.runs.line()
        sizes = [] if line is None else [int(share * line) // self.multiple for share in (*SHARES[::-1], 1)]
        return next((size for size in sizes if low < size < high), middle)

    def units(self, size: int) -> int:
        """Return the multiples that hold a size, within the cap."""
        return min(self.cap, -(-size // self.multiple))


class Fit(NamedTuple):
    """A program, and the sizes of the runs that have its structure."""

    program: Program
    sizes: tuple[int, ...]


class Runs:
    """Runs of a search that came to their end, and what they say of other sizes.

    Args:
        new_allocator: returns an empty allocator with the budget as its limit.
        known: programs of an earlier search, which count until two runs give others.
    """

    def __init__(self, new_allocator: Callable[[], Allocator], known: Sequence[Program] = ()) -> None:
        self._new_allocator = new_allocator
        self._known = [Fit(program, ()) for program in known]
        self._ran: dict[int, Attempt] = {}
        """Runs that fit, by size."""
        self._orders: tuple[dict[int, Trace], ...] = ({}, {})
        """Whole traces in each order of steps, by size."""
        self._fits: list[Fit] = self._known
        """What the largest runs of one structure give, for each order that has such."""
        self._fitting = Fitting(self.programs, new_allocator) if known else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the step in each order that ran."""
        return tuple(fit.program for fit in self._fits)

    @property
    def is_of_largest(self) -> bool:
        """True if the largest run that fits has the structure of what is replayed."""
        if self._fits is self._known:
            return bool(self._known)
        return max(self._ran, default=0) in self._fits[0].sizes

    def add(self, outcome: Outcome) -> None:
        """Learn from a run. One that failed is whole if it broke a rule, or failed in the other order."""
        attempt = outcome.attempt
        if attempt.fits:
            self._ran[attempt.micro_batch] = attempt
        is_whole = attempt.fits or attempt.phase is None
        wholes = (is_whole or outcome.other is not None, is_whole)
        for traces, trace, whole in zip(self._orders, (outcome.trace, outcome.other), wholes, strict=True):
            if trace is not None and whole:
                traces[attempt.micro_batch] = trace.canonical()
        self._fits = [fit for fit in map(fit_largest, self._orders) if fit is not None] or self._known
        self._fitting = Fitting(self.programs, self._new_allocator) if self._fits else None

    def largest(self, cap: int, multiple: int) -> int | None:
        """Return the largest size that fits according to the replay; None if there is none."""
        with suppress(Untraceable):
            return self._fitting.largest(cap, multiple) if self._fitting else None
        return None

    def refuse(self, size: int, above: int) -> bool:
        """Return whether a replay that agrees to the byte with the run of a size refuses the next one."""
        ran = self._ran.get(size)
        if ran is None or self._fitting is None:
            return False
        with suppress(Untraceable):
            said = replay(self._fits[0].program.at(size), self._new_allocator())
            if ran.peak_reserved_bytes is None:
                agrees = said.peak_allocated_bytes == ran.peak_allocated_bytes
            else:
                agrees = said.peak_reserved_bytes == ran.peak_reserved_bytes
            return agrees and self._fitting.fits(size) and not self._fitting.fits(above)
        return False

    def line(self) -> int | None:
        """Return the size at which a line meets the budget; None if memory does not grow.

        It goes through the allocated peaks of the two largest runs, or through the peak of a single one and
        the bytes that it held at its end.
        """
        budget = self._new_allocator().limit
        peaks = sorted((size, ran.peak_allocated_bytes or 0) for size, ran in self._ran.items())[-2:]
        if budget is None or not peaks:
            return None
        size, peak = peaks[-1]
        less, held = peaks[0] if len(peaks) > 1 else (0, _held_bytes(self._orders[0].get(size)))
        return size + int((budget - peak) * (size - less) / (peak - held)) if peak > held else None


def fit_largest(traces: dict[int, Trace]) -> Fit | None:
    """Fit a program to the largest traces of one structure; None if each has its own."""
    groups: dict[int, list[tuple[int, Trace]]] = {}
    for size in sorted(traces, reverse=True):
        shape = tuple((block, bytes_ == FREE) for block, bytes_ in traces[size].events)
        groups.setdefault(hash((shape, traces[size].marks)), []).insert(0, (size, traces[size]))
    for alike in groups.values():
        # Three are a parabola; the two largest still are a line where three follow none.
        for points in (alike, alike[-2:]):
            with suppress(Untraceable, ValueError):
                return Fit(Program.fit(points), tuple(size for size, _ in alike))
    return None


def _held_bytes(trace: Trace | None) -> int:
    """Return the bytes that a run holds at its end; 0 if they are unknown."""
    live: dict[int, int] = {}
    for block, size in () if trace is None else trace.events:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = size
    return sum(live.values())
