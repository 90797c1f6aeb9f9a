"""The search for the largest micro-batch that fits: it measures small runs, replays them, and confirms.

    4 samples ──► 12, or half of what a line says ──► replay of both ──► m, the run that confirms
    kernels of large sizes are others: ¾, then 9⁄10 of the line ──► replay of these ──► m

That m + 1 does not fit is proven by a run, by a replay that agrees with the run at m to the byte, or because
m is the cap. This module knows no device and no model: a size goes in, an `Outcome` comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from autobatch.core.largest import Bracket, most_asked, told_apart
from autobatch.core.records import Attempt, LimitedBy, Probe, UpperBoundBy
from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.alignment import Sized, align
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable
from autobatch.rehearsal.attempt import Outcome

FIRST = 4
"""The first size: smaller ones are special cases for many kernels."""
SECOND = 12
"""The second size, if a line through the first run leaves room for it."""
SHARES = (0.75, 0.9)
"""Shares of a line at which large sizes run that have no structure in common with smaller ones."""
ROOM = 0.75
"""Share of the budget up to which a line through one run is enough to ask for the cap."""
FAR = 64
"""Ratio of the cap to the size of that run up to which it is."""
REACH = 2
"""Ratio of the largest size in question to a guess. Larger sizes are in question once that one fits."""
LOST = "lost GPU context"
"""The reason for which a search stops if the process that lost its context cannot be replaced."""
ENDLESS = 1 << 62
"""A size that no data has."""
NEAR = 16
"""A guess that a run has confirmed leaves one part in this many of it in question, above it."""
NEAR_BY = 8
"""Sizes between two runs from which on the middle is asked for in place of a guess that a run has refuted."""


class SearchResult(NamedTuple):
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
    """``interrupt`` or `LOST`; None if the search ran to its end."""
    tops: tuple[int, ...] = ()
    """The largest size in question, and larger ones that came into question because all up to there fit."""
    programs: tuple[Program, ...] = ()
    """The steps at any size, in each order that ran; empty if no two runs have the same structure."""
    falls: bool = False
    """True if the replay agrees with the runs where each new segment lies below those before it."""

    def probe(self, caps: Mapping[LimitedBy, int], *, multiple: int, saved_on: str | None) -> Probe:
        """Return the record of the search.

        Args:
            caps: the limits of the micro-batch besides memory, in samples. The first that the answer reaches
                limits it.
            multiple: the number whose multiples ran.
            saved_on: date of the saved limit that the search began with; None without one.
        """
        is_confirmed = saved_on is not None and [run.micro_batch for run in self.attempts] == [
            self.micro_batch
        ]
        return Probe(
            micro_batch=self.micro_batch,
            limited_by=next((name for name, cap in caps.items() if cap == self.micro_batch), "memory"),
            upper_bound_by=self.upper_bound_by,
            predicted_micro_batch=self.predicted,
            oom_count=sum(not (run.fits or run.is_error) for run in self.attempts),
            attempts=self.attempts,
            multiple=multiple,
            stopped_by=self.stopped_by,
            source=f"saved {saved_on}" if is_confirmed else "search",
        )


def find_largest(
    run: Callable[[int], Outcome],
    *,
    cap: int,
    new_allocator: Callable[[], Allocator],
    falling: Callable[[], Allocator] | None = None,
    multiple: int = 1,
    guess: int | None = None,
    known: Sequence[Program] = (),
    first: int = FIRST,
) -> SearchResult:
    """Find the largest micro-batch that fits.

    With s sizes in question, at most log2(s) + 3 run, and at most half of log2(s) + 2 do not fit, whatever
    fits and whatever the runs record; see `autobatch.core.largest.Bracket`. In question are the sizes up to
    `REACH` times a guess, rounded up to a power of two. If the largest of them fits, larger ones are in
    question, with a bound of their own.

    Args:
        run: makes an attempt, and returns the error of one that fails for another reason than memory.
        cap: largest size of the search, at least ``multiple``.
        new_allocator: returns an empty model of the device's allocator, limited to the budget.
        falling: returns the same whose segments lie below those before them; None if the order is known.
        multiple: the number whose multiples run.
        guess: the likely answer, which runs first; None if nothing is known.
        known: programs of the step that came with the guess; a run that agrees with them ends the search.
        first: the first size without a guess.

    Returns:
        The result. A ``KeyboardInterrupt`` in ``run`` ends the search, and so does an error after which no
        size can run.

    Raises:
        Exception: the first error, if nothing fits, and the smallest size for another reason than memory.
    """
    search = _Search(run, cap // multiple, multiple, Runs(new_allocator, falling, known))
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
    tops = tuple(top * multiple for top in search.tops)
    runs = search.runs
    return SearchResult(
        low, by, search.predicted, search.attempts, stopped_by, tops, runs.programs, runs.falls
    )


class _Stopped(Exception):  # noqa: N818 - the end of a search is no fault
    """The search ends with what it has."""


@dataclass
class _Search:
    """The state of a search. Sizes are counted in multiples."""

    run: Callable[[int], Outcome]
    cap: int
    multiple: int
    runs: Runs
    low: int = 0
    """The largest size that ran and fits."""
    refused: dict[int, UpperBoundBy] = field(default_factory=dict)
    """The proof for each size that does not fit."""
    attempts: list[Attempt] = field(default_factory=list)
    predicted: int | None = None
    """The first answer of a replay, in samples."""
    tops: list[int] = field(default_factory=list)
    """The largest size in question of each bound."""
    error: Exception | None = None
    """The first that had another reason than memory."""

    @property
    def high(self) -> int:
        """The least size that does not fit above the largest that does, or one above the cap."""
        return min((size for size in self.refused if size > self.low), default=self.cap + 1)

    def begin(self, first: int, guess: int | None) -> None:
        """Run two small sizes and what their replay says, or large ones if the small ones are unlike."""
        if guess is not None and self.fits(self.units(guess)):
            if not self.proof() and self.low > 1:  # a second run tells what the known programs do not
                self.fits(int(SHARES[0] * self.low))
            return
        if not self.fits_between(first):
            return
        if self.units(FAR * first) == self.cap and self.runs.line(ROOM) >= self.cap * self.multiple:
            self.fits_between(self.cap * self.multiple)
            return
        line = self.runs.line() // self.multiple
        second = min(self.units(SECOND), line // 2)
        if second <= self.low:  # 1 is a special case for batch statistics
            second = self.low + 1 if line > self.low + 1 or self.low < FIRST else self.low // 2
        if second < self.high:
            self.fits(second)
        if not self.runs.is_aligned:  # small runs that differ say little about large ones
            self.predicted = self.runs.largest(self.cap * self.multiple, self.multiple)
        if self.predicted is not None:
            self.fits_between(self.predicted)
            return
        for share in SHARES:
            if self.runs.is_aligned or not self.runs.is_of_largest:
                self.fits_between(share * self.runs.line())

    def fits_between(self, size: float) -> bool:
        """Run a size, in samples, if it is above the largest that fits and below the least that does not."""
        asked = self.units(int(size))
        return self.low < asked < self.high and self.fits(asked)

    def find(self) -> None:
        """Ask for sizes between one that fits and one that does not, until the next size is refused.

        What fits is not monotone: a replay may know of larger sizes, of which one runs if questions are left.
        """
        bracket, is_first = self.bracket([attempt.fits for attempt in self.attempts]), True
        while True:
            while not self.proof():
                if not bracket.is_open:
                    bracket, is_first = self.bracket([]), False
                guess = self.guess(bracket.low, bracket.high)
                if is_first:  # its small runs have left few questions
                    bracket = bracket.around(max(guess, bracket.low + 1))
                size = bracket.nearest(guess)
                bracket = bracket.after(size, self.fits(size))
            larger = self.larger()
            if larger is None or bracket.asked < 2 or bracket.failed < 1 or not self.fits(larger):
                return
            bracket = bracket._replace(asked=bracket.asked - 1)
            high = min(self.high, self.low + told_apart(bracket.asked, bracket.failed))
            bracket = bracket._replace(low=self.low, high=high)

    def larger(self) -> int | None:
        """Return a larger size than the answer that fits according to the replay; None if there is none."""
        size = (self.runs.largest(self.cap * self.multiple, self.multiple) or 0) // self.multiple
        is_refuted = any(size <= other <= size + size // NEAR for other in self.refused)
        return size if size > self.low and self.runs.is_of_largest and not is_refuted else None

    def bracket(self, spent: Sequence[bool]) -> Bracket:
        """Return the sizes in question, and the allowance of their bound less the runs that are spent."""
        guess = self.guess(self.low, self.cap + 1 if self.low else self.high)
        ran = max((attempt.micro_batch // self.multiple for attempt in self.attempts), default=1)
        top = min(self.cap, max(REACH * guess, REACH * self.low, ran))
        self.tops.append(top)
        asked, failed = most_asked(top)
        asked, failed = asked - len(spent), failed - spent.count(False)
        high = min(self.high, top + 1, self.low + told_apart(asked, failed))
        return Bracket(self.low, high, asked, failed)

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
        outcome = self.run(size * self.multiple)
        self.attempts.append(outcome.attempt)
        if outcome.error is not None:
            self.error = self.error or outcome.error
            if size <= max(1, self.low):
                raise outcome.error if size <= self.low else self.error
            self.refused[size] = "error"
            if outcome.is_context_lost and self.low:
                raise _Stopped(LOST)
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
        if self.refused.get(high) == "error" and high + 1 not in self.refused:
            return high - 1  # it bounds nothing: maybe odd sizes fail
        replayed = self.runs.largest(self.cap * self.multiple, self.multiple)
        if replayed is not None:
            self.predicted = self.predicted or replayed
            size = replayed // self.multiple
            # A guess that a failed run refutes teaches nothing near that run.
            if self.runs.is_of_largest and low <= size:
                return size if size < high or high - low <= NEAR_BY else middle
            if size == low:
                return size
        sizes = [int(share * self.runs.line()) // self.multiple for share in (*SHARES[::-1], 1)]
        return next((size for size in sizes if low < size < high), middle)

    def units(self, size: int) -> int:
        """Return the multiples that hold a size, within the cap."""
        return min(self.cap, -(-size // self.multiple))


class Fit(NamedTuple):
    """A program, and the sizes of the runs that it was fitted to."""

    program: Program
    sizes: tuple[int, ...]
    is_aligned: bool = False
    """True if the runs differ in a few blocks: it tells what may fit, and proves nothing."""


class Runs:
    """Runs of a search that came to their end, and what they say of other sizes.

    Args:
        new_allocator: returns an empty allocator with the budget as its limit.
        falling: the same, with segments in the other order; the driver decides which it is, and runs tell.
        known: programs of an earlier search, which count until two runs give others.
    """

    def __init__(
        self,
        new_allocator: Callable[[], Allocator],
        falling: Callable[[], Allocator] | None = None,
        known: Sequence[Program] = (),
    ) -> None:
        self._models = [new_allocator, *([] if falling is None else [falling])]
        self._agreed = [0] * len(self._models)
        """Peaks of runs, up to their error if they failed, that a replay in each model meets to the byte."""
        self._known = [Fit(program, ()) for program in known]
        self._ran: dict[int, Attempt] = {}
        """Runs that fit, by size."""
        self._orders: tuple[dict[int, Trace], ...] = ({}, {})
        """Whole traces in each order of steps, by size."""
        self._fits: list[Fit] = self._known
        """What the largest runs give, for each order that has such."""
        self._exact: list[Fit] = self._known
        """The same of runs of one structure, which may prove something."""
        self._fitting = Fitting(self.programs, new_allocator) if known else None

    @property
    def falls(self) -> bool:
        """True if segments in the falling order agree with more runs."""
        return self._agreed[-1] > self._agreed[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the step in each order that ran."""
        return tuple(fit.program for fit in self._fits)

    @property
    def is_aligned(self) -> bool:
        """True if what is replayed was fitted to runs that differ in a few blocks."""
        return any(fit.is_aligned for fit in self._fits)

    @property
    def is_of_largest(self) -> bool:
        """True if what is replayed was fitted to the largest run that fits."""
        if self._fits is self._known:
            return bool(self._known)
        return max(self._ran, default=0) in self._fits[0].sizes

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
        exact = [fit_alike(traces) for traces in self._orders]
        fits = [fit_largest(traces, fit) for traces, fit in zip(self._orders, exact, strict=True)]
        self._fits = [fit for fit in fits if fit is not None] or self._known
        if exact[0] is not None:
            self._exact = [fit for fit in exact if fit is not None]
        self._fitting = Fitting(self.programs, self._new_allocator) if self._fits else None

    def _new_allocator(self) -> Allocator:
        return self._models[-1 if self.falls else 0]()

    def largest(self, cap: int, multiple: int) -> int | None:
        """Return the largest size that fits according to the replay; None if there is none."""
        with suppress(Untraceable):
            return self._fitting.largest(cap, multiple) if self._fitting else None
        return None

    def refuse(self, size: int, above: int) -> bool:
        """Return whether replays that agree to the byte with the run of a size refuse the next one.

        If runs do not tell the order of segments, replays in both orders must.
        """
        ran = self._ran.get(size)
        if ran is None or not self._exact:
            return False
        likely = [
            model
            for model, agreed in zip(self._models, self._agreed, strict=True)
            if agreed == max(self._agreed)
        ]
        with suppress(Untraceable):
            return all(self._refuses(model, ran, above) for model in likely)
        return False

    def _refuses(self, new_allocator: Callable[[], Allocator], ran: Attempt, above: int) -> bool:
        """Return whether a replay in a model agrees with a run to the byte, and refuses a larger size."""
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
        budget = self._new_allocator().limit
        runs = sorted(self._ran.items())[-2:]
        if budget is None or not runs:
            return ENDLESS
        (less, small), (size, large) = runs[0], runs[-1]
        peaks = small.peak_reserved_bytes or 0, large.peak_reserved_bytes or 0
        if peaks[0] == peaks[1]:  # small runs have their first segments only
            peaks = small.peak_allocated_bytes or 0, large.peak_allocated_bytes or 0
        if len(runs) == 1:
            held = _held_bytes(self._orders[0].get(size))
            less, peaks = 0, (held if held < peaks[1] else 0, peaks[1])
        if peaks[0] >= peaks[1]:
            return ENDLESS
        return size + int((share * budget - peaks[1]) * (size - less) / (peaks[1] - peaks[0]))


def fit_alike(traces: dict[int, Trace]) -> Fit | None:
    """Fit a program to the largest traces of one structure; None if there are no two."""
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


def fit_largest(traces: dict[int, Trace], exact: Fit | None) -> Fit | None:
    """Fit a program to the two largest traces, although they may differ in a few blocks.

    Args:
        traces: of one order of steps, by size.
        exact: that of `fit_alike`, which is the answer if the largest is among its traces, or if the two
            largest part too far.
    """
    two = sorted(traces.items())[-2:]
    if len(two) > 1 and (exact is None or two[-1][0] not in exact.sizes):
        with suppress(Untraceable):
            aligned = align([Sized(size, trace) for size, trace in two])
            return Fit(aligned.program, tuple(size for size, _ in two), is_aligned=True)
    return exact


def _held_bytes(trace: Trace | None) -> int:
    """Return the bytes that a run holds at its end; 0 if they are unknown."""
    live: dict[int, int] = {}
    for block, size in () if trace is None else trace.events:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = size
    return sum(live.values())
