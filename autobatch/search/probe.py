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
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.largest import Bracket, most_asked, told_apart
from autobatch.core.records import Attempt, LimitedBy, Positive, Probe, UpperBoundBy
from autobatch.device.allocator import Allocator
from autobatch.device.trace import Trace, replay
from autobatch.footprint.program import Fitting, Program, Untraceable, structure_of
from autobatch.rehearsal.rehearsal import Outcome

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
NEAR = 16
"""A size that failed refutes a guess up to one part in this many below it."""
NEAR_BY = 8
"""Sizes between two runs from which on the middle is asked for in place of a guess that a run has refuted."""


ENDLESS = 1 << 62
"""A size that no data has."""


class SavedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The largest micro-batch of a workload on a device, as it was found."""

    micro_batch: Positive
    programs: tuple[Program, ...] = ()
    """The steps at any size, in each order that ran."""
    date: str = msgspec.field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    """ISO date on which it was found."""


class Limit(NamedTuple):
    """The answer of a search, and what later stages take from it."""

    probe: Probe
    """Its ``micro_batch`` ran and fits; 0 if nothing did."""
    programs: Sequence[Program] = ()
    """The steps at any size, in each order that ran; empty if no two runs have the same structure."""
    trace: Trace | None = None
    """The events of the run at the limit; None if none were recorded."""
    file: Path | None = None
    """File that keeps the answer; None if it was not saved."""
    planned: int = 0
    """The largest micro-batch that a plan may ask for; less than the limit if an even split does not fit."""


def find_largest(
    run: Callable[[int], Outcome],
    caps: Mapping[LimitedBy, int | None],
    new_allocator: Callable[[], Allocator],
    *,
    multiple: int = 1,
    known: SavedLimit | None = None,
    first: int = FIRST,
) -> Limit:
    """Find the largest micro-batch that fits.

    With s sizes in question, at most log2(s) + 3 run, and at most half of log2(s) + 2 do not fit, whatever
    fits and whatever the runs record; see `autobatch.core.largest.Bracket`. In question are the sizes up to
    `REACH` times a guess. If the largest of them fits, larger ones are, with a bound of their own.

    Args:
        run: makes an attempt, and returns the error of one that fails for another reason than memory.
        caps: the limits of the micro-batch besides memory, in samples; None for no limit. The first that the
            answer reaches limits it.
        new_allocator: returns an empty model of the device's allocator, limited to the budget.
        multiple: the number whose multiples run.
        known: an earlier limit, whose programs give the first size; a run that agrees with them ends the
            search. None if nothing is known.
        first: the first size without one.

    Raises:
        InputError: the caps leave no multiple.
        Exception: the first error, if nothing fits, and the smallest size for another reason than memory.
    """
    if (most := min(filter(None, caps.values()))) < multiple:
        raise InputError(
            f"no multiple of {multiple:,} (--micro-batch-multiple) is a micro-batch of at most {most:,} "
            "samples: give a larger --max-micro-batch, a larger target batch or more data"
        )
    fitting = Fitting(() if known is None else known.programs, new_allocator)
    search = _Search(run, new_allocator, most // multiple, multiple, fitting)
    search.begin(first, known)
    search.find()
    answer, attempts = search.low * multiple, search.attempts
    is_confirmed = known is not None and [attempt.micro_batch for attempt in attempts] == [answer]
    probe = Probe(
        micro_batch=answer,
        limited_by=next((name for name, cap in caps.items() if cap and answer + multiple > cap), "memory"),
        upper_bound_by=search.proof() if answer else None,
        predicted_micro_batch=search.predicted,
        oom_count=sum(not (attempt.fits or attempt.is_error) for attempt in attempts),
        attempts=attempts,
        multiple=multiple,
        source=f"saved {known.date}" if known is not None and is_confirmed else "search",
    )
    return Limit(probe, search.fitting.orders, search.traces[0].get(answer))


@dataclass
class _Search:
    """The state of a search. Sizes are counted in multiples, but those of runs and programs in samples."""

    run: Callable[[int], Outcome]
    new_allocator: Callable[[], Allocator]
    cap: int
    multiple: int
    fitting: Fitting
    """The programs of the step in each order that ran: known ones, or none, until two runs of one structure
    give others."""
    fitted: Sequence[int] = ()
    """The runs of one structure to which the programs were fitted; none if they were known."""
    traces: tuple[dict[int, Trace], ...] = field(default_factory=lambda: ({}, {}))
    """Whole traces in each order of steps, by the size of the run."""
    low: int = 0
    """The largest size that ran and fits."""
    refused: dict[int, UpperBoundBy] = field(default_factory=dict)
    """The proof for each size that does not fit."""
    attempts: list[Attempt] = field(default_factory=list)
    predicted: int | None = None
    """The first answer of a replay, in samples."""
    error: Exception | None = None
    """The first that had another reason than memory."""

    @property
    def high(self) -> int:
        """The least size that does not fit above the largest that does, or one above the cap."""
        return min((size for size in self.refused if size > self.low), default=self.cap + 1)

    @property
    def ran(self) -> dict[int, Attempt]:
        """The runs that fit, by size."""
        return {attempt.micro_batch: attempt for attempt in self.attempts if attempt.fits}

    @property
    def is_of_largest(self) -> bool:
        """True if what is replayed was fitted to the largest run that fits, or nothing else is known."""
        return bool(self.fitting.orders) and (not self.fitted or self.low * self.multiple in self.fitted)

    def begin(self, first: int, known: SavedLimit | None) -> None:
        """Run the limit that is known, or small sizes and what they say."""
        if known is not None:
            if self.try_size(self.replayed() or known.micro_batch) and not self.proof() and self.low > 1:
                self.fits(int(SHARES[0] * self.low))  # a second run tells what the known programs do not
            return
        if not self.try_size(first):
            return
        most = self.cap * self.multiple
        if most <= FAR * first and most <= self.line(ROOM):
            self.try_size(most)
            return
        self.try_size(max((self.low + 1) * self.multiple, min(SECOND, self.line() // 2)))
        if (replayed := self.replayed()) is not None:
            self.try_size(replayed)
            return
        for share in SHARES:  # small runs that differ say nothing about large ones
            if not self.is_of_largest:
                self.try_size(share * self.line())

    def try_size(self, samples: float) -> bool:
        """Run the multiples that hold a size if it is between what fits and what does not."""
        size = min(self.cap, -(-int(samples) // self.multiple))
        return self.low < size < self.high and self.fits(size)

    def find(self) -> None:
        """Ask for sizes between one that fits and one that does not, until the next size is refused.

        What fits is not monotone: one of the larger sizes that a replay knows of runs if questions are left.
        """
        bracket = self.bracket([attempt.fits for attempt in self.attempts])
        while True:
            while not self.proof():
                if not bracket.is_open:
                    bracket = self.bracket([])
                guess = self.guess(bracket.low, bracket.high)
                # The first runs have left few questions: sizes far above wait for a bound of their own.
                bracket = bracket.around(max(guess, bracket.low + 1))
                size = bracket.nearest(guess)
                bracket = bracket.after(size, self.fits(size))
            larger = (self.replayed() or 0) // self.multiple * self.is_of_largest
            is_refuted = any(larger <= size <= larger + larger // NEAR for size in self.refused)
            asked, failed = bracket.asked - 1, bracket.failed
            if larger <= self.low or is_refuted or min(asked, failed) < 1 or not self.fits(larger):
                return
            bracket = Bracket(self.low, min(self.high, self.low + told_apart(asked, failed)), asked, failed)

    def bracket(self, spent: Sequence[bool]) -> Bracket:
        """Return the sizes in question, and the allowance of their bound less the runs that are spent."""
        guess = self.guess(self.low, self.cap + 1 if self.low else self.high)
        ran = max((attempt.micro_batch // self.multiple for attempt in self.attempts), default=1)
        top = min(self.cap, max(REACH * guess, REACH * self.low, ran))
        asked, failed = most_asked(top)
        asked, failed = asked - len(spent), failed - spent.count(False)
        high = min(self.high, top + 1, self.low + told_apart(asked, failed))
        return Bracket(self.low, high, asked, failed)

    def proof(self) -> UpperBoundBy | None:
        """Return the proof that the size after the largest does not fit; None if there is none yet."""
        if self.low == self.cap:
            return "cap"
        above = self.low + 1
        if above not in self.refused and self.replay_refuses(above):
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
            return False
        self.learn(outcome)
        if outcome.attempt.fits:
            self.low = max(self.low, size)
        else:
            self.refused[size] = "run"
        return outcome.attempt.fits

    def guess(self, low: int, high: int) -> int:
        """Return the likely largest size between two: that of a replay, or a share of a line."""
        if self.refused.get(high) == "error" and high + 1 not in self.refused:
            return high - 1  # it bounds nothing: maybe odd sizes fail
        middle, replayed = (low + high) // 2, (self.replayed() or 0) // self.multiple
        if self.is_of_largest and low <= replayed:
            # A guess that a failed run refutes teaches nothing near that run.
            return replayed if replayed < high or high - low <= NEAR_BY else middle
        sizes = [int(share * self.line()) // self.multiple for share in (*SHARES[::-1], 1)]
        return next((size for size in sizes if low < size < high), middle)

    def replayed(self) -> int | None:
        """Return the largest size that fits according to the replay, in samples; None if there is none."""
        if not self.fitting.orders:
            return None
        size = self.fitting.largest(self.cap * self.multiple, self.multiple)
        self.predicted = self.predicted or size
        return size

    def replay_refuses(self, above: int) -> bool:
        """Return whether a replay that agrees to the byte with the largest run refuses the size above it."""
        size, programs = self.low * self.multiple, self.fitting.orders
        if not size or not programs:
            return False
        ran, said = self.ran[size], replay(programs[0].at(size), self.new_allocator())
        agrees = said.peak_reserved_bytes == ran.peak_reserved_bytes
        if ran.peak_reserved_bytes is None:  # the allocator keeps nothing
            agrees = said.peak_allocated_bytes == ran.peak_allocated_bytes
        above *= self.multiple
        nexts = (replay(each.at(above, since=size), self.new_allocator()) for each in programs)
        return said.fits and agrees and not all(each.fits for each in nexts)

    def learn(self, outcome: Outcome) -> None:
        """Learn from a run. One that failed is whole if it broke a rule, or failed in the other order."""
        attempt = outcome.attempt
        is_whole = attempt.fits or attempt.phase is None
        if outcome.trace is not None and (is_whole or outcome.other is not None):
            self.traces[0][attempt.micro_batch] = outcome.trace
        if outcome.other is not None and is_whole:
            self.traces[1][attempt.micro_batch] = outcome.other
        fitted, *others = (_fit_alike(traces) for traces in self.traces)
        if fitted is not None:
            programs = [program for program, _ in (fitted, *filter(None, others))]
            self.fitted, self.fitting = fitted[1], Fitting(programs, self.new_allocator)

    def line(self, share: float = 1.0) -> int:
        """Return the size at which a line meets a share of the budget, `ENDLESS` if memory does not grow.

        It goes through the peaks of the two largest runs, or through that of a single one and the bytes that
        it held at its end.
        """
        budget, runs = self.new_allocator().limit, sorted(self.ran.items())[-2:]
        if budget is None or not runs:
            return ENDLESS
        (less, small), (size, large) = runs[0], runs[-1]
        low, high = small.peak_reserved_bytes or 0, large.peak_reserved_bytes or 0
        if low == high:  # small runs have their first segments only
            low, high = small.peak_allocated_bytes or 0, large.peak_allocated_bytes or 0
        if less == size:
            less, trace = 0, self.traces[0].get(size)
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
