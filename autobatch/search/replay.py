"""Replay of a step: it predicts what fits, and every run confirms or corrects it.

    trace ──► program ──replay──► guess ──run──► events: equal? confirmed; else the program is built anew

If a run takes other memory than was traced, its events replace the traced ones. Only the sizes of its blocks
at other micro-batches are inferred:

- A block that has a size of the program keeps its rule.
- A block of the model's own tensors is constant.
- Any other block has its size as the lower bound, and growth in proportion to the micro-batch as the upper
  one.

Guesses take the upper bound, and proofs the lower one.

The allocator's choice among free blocks of the same size depends on the addresses of segments, which a GPU's
driver decides. So there may be several models of the allocator. A run with the events of the program refutes
the models in which it would end otherwise. A proof must hold in all models that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.fit import Footprint
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.predict import program_on
from autobatch.footprint.program import Polynomial, Program, Rule, Untraceable, interpolate
from autobatch.rehearsal.attempt import Outcome
from autobatch.rehearsal.setup import SetupInfo, new_allocator

MISS = 16
"""After a first failure, the next guess skips one part in this many of the sizes: traces miss little."""


class Bounds(NamedTuple):
    """Programs of a step that bound its memory; equal where its events are known at every micro-batch."""

    lower: Program
    upper: Program


def replay_on(
    info: SetupInfo, step: Footprint | None, other_order: Callable[[], Program | None] = lambda: None
) -> Replay:
    """Return the replay of a traced step on the device of a setup; without a step, of runs alone."""
    is_uncertain = info.allocator is not None and info.allocator.falls is None
    return Replay(
        lambda: new_allocator(info),
        None if step is None else program_on(step, info.libraries),
        other_order,
        [lambda: new_allocator(info, falls=True)] if is_uncertain else [],
    )


class Replay:
    """A prediction of what fits, by a program of the step that each run confirms or corrects.

    Args:
        new_allocator: makes an empty allocator with the device's budget.
        program: the traced events of an attempt; None if it was not traced.
        other_order: traces an attempt in the other order of its steps; called once a size fails in that order
            only.
        other_allocators: make empty allocators of other models, each of which may be the right one.
    """

    def __init__(
        self,
        new_allocator: Callable[[], Allocator],
        program: Program | None = None,
        other_order: Callable[[], Program | None] = lambda: None,
        other_allocators: Sequence[Callable[[], Allocator]] = (),
    ) -> None:
        self._new_allocator = new_allocator
        self._allocators = [new_allocator, *other_allocators]
        """The models of the allocator that no run has refuted, the likeliest first."""
        self._traced = program
        self._other_order = other_order
        self._orders = [] if program is None else [Bounds(program, program)]
        self._runs: list[Outcome] = []
        """Runs that came to their end, whether they fitted or went over the budget."""
        self._allocated: dict[int, int] = {}
        """Peaks of the bytes in live blocks of the runs that fit, by size."""
        self._failed: list[int] = []
        self._prefixes: list[Bounds] = []
        """The events of the last failure up to it, until a run comes to its end."""
        self._is_right = True
        """False if the last run fitted although the replay said that it would not."""
        self._fit()

    def learn(self, outcome: Outcome) -> None:
        """Confirm or correct the program by an attempt."""
        attempt, ran = outcome.attempt, outcome.trace
        size = attempt.micro_batch
        if not attempt.fits:
            self._failed.append(size)
        elif attempt.peak_allocated_bytes:
            self._allocated[size] = attempt.peak_allocated_bytes
        if ran is None:
            return
        if attempt.fits:
            self._is_right = False
            with suppress(Untraceable):
                self._is_right = self._upper[0].fits(size)
        failed_in_other = not attempt.fits and outcome.other is not None
        if attempt.phase is None or failed_in_other:
            self._runs.append(outcome)
            if not (self._orders and self._orders[0].upper.agrees_with(size, ran)):
                self._correct()
            else:
                # What was fitted to other runs is confirmed now.
                self._orders[0] = Bounds(self._orders[0].upper, self._orders[0].upper)
                self._prefixes = []
                if failed_in_other:
                    self.add_other_order()
        elif not self._runs:
            self._prefixes = [self._prefix(outcome, ran)]
        if self._orders and not (failed_in_other and len(self._orders) == 1):
            self._refute(size, ran, fits=attempt.fits)
        self._fit()

    def add_other_order(self) -> None:
        """Take the other order into account, in which a size may fail that fits in the first."""
        other = self._other_order() if len(self._orders) == 1 else None
        self._orders += [] if other is None else [Bounds(other, other)]
        self._fit()

    def _correct(self) -> None:
        """Build the program anew from the run that is nearest to the limit."""
        nearest = max(self._runs, key=lambda run: (1 if run.attempt.fits else -1) * run.attempt.micro_batch)
        size, failed = nearest.attempt.micro_batch, not nearest.attempt.fits
        others = [run for run in self._runs if run.attempt.micro_batch != size]

        def bounds(order: Callable[[Outcome], Trace | None]) -> Bounds:
            events = order(nearest)
            assert events is not None
            ran = [(run.attempt.micro_batch, found) for run in others if (found := order(run)) is not None]
            return bounds_of(size, events, self._traced, ran, failed=failed)

        self._prefixes = []
        try:
            self._orders = [bounds(lambda run: run.trace)]
            if nearest.other is not None and nearest.attempt.phase is None:
                self._orders.append(bounds(lambda run: run.other))
            elif nearest.other is not None:
                self._prefixes = [self._prefix(nearest, nearest.other)]
        except Untraceable:
            self._orders = []

    def _prefix(self, outcome: Outcome, ran: Trace) -> Bounds:
        """Return bounds from the events up to a failure, followed by the request that failed."""
        if outcome.requested_bytes is not None:
            ran = ran.canonical()
            block = 1 + max((block for block, _ in ran.events), default=-1)
            ran = Trace((*ran.events, (block, outcome.requested_bytes)), ran.marks)
        return bounds_of(outcome.attempt.micro_batch, ran, self._traced, failed=True)

    def _refute(self, size: int, ran: Trace, *, fits: bool) -> None:
        """Leave out the models of the allocator in which a run with known events ends otherwise."""
        programs = [one.upper for one in self._orders]
        try:
            if not fits:
                # Its events are known if they are the first ones of the program.
                known, events = (one.without_empty().events for one in (programs[0].at(size), ran))
                if events != known[: len(events)]:
                    return
            right = [new for new in self._allocators if Fitting(programs, new).fits(size) is fits]
        except Untraceable:
            return
        self._allocators = right or self._allocators

    def largest(self, cap: int) -> int | None:
        """Predict the largest micro-batch up to ``cap`` that fits, possibly 0; None if nothing is known."""
        found = [one for one in (self._by_events(cap), self._by_bytes(cap)) if one is not None]
        return max(found) if self.has_run and found else next(iter(found), None)

    def guess(self, low: int, high: int) -> int:
        """Guess the largest size between one that fits and one that does not."""
        by_events, by_bytes = self._by_events(high - 1), self._by_bytes(high - 1)
        is_refuted = high in self._failed and self.says_fits(high) is not False
        if by_events is not None and not is_refuted:
            if by_events > low:
                return by_events
            if self._is_right or self.says_fits(low + 1) is False:
                return low + 1
        if by_bytes is not None and low < by_bytes < high - 1:
            return by_bytes
        if high not in self._failed:
            return high - 1
        # The program lacks the memory that made it fail. Until a run shows that, only the two sizes count.
        if high < 2 * low and low - 1 not in self._allocated:
            # The size that ran is probably the largest, which one run shows.
            return low + 1
        return high - max(1, (high - low) // MISS) if len(self._failed) == 1 else (low + high) // 2

    def _by_events(self, cap: int) -> int | None:
        """Return the largest size whose replay fits; None if no events are known."""
        if not (self._orders or self._prefixes):
            return None
        # After a failure, the model of the allocator in which least fits counts.
        models = self._upper if self._failed else self._upper[:1]
        try:
            return min(one.largest(cap) for one in models)
        except Untraceable:
            self._orders, self._prefixes = [], []
            return None

    def _by_bytes(self, cap: int) -> int | None:
        """Return where a line through the allocated bytes of the two largest runs meets the budget.

        What is reserved grows in steps, on which a line would go astray.
        """
        budget = self._new_allocator().limit
        if not self._allocated or budget is None:
            return None
        (small, less), (ran, most) = [(0, 0), *sorted(self._allocated.items())][-2:]
        per_sample = max(most - less, 1) / (ran - small)
        return min(cap, ran + int((budget - most) / per_sample))

    def says_fits(self, size: int) -> bool | None:
        """Return whether a size fits according to what runs have shown; None if that is uncertain."""
        try:
            if not (self._orders or self._prefixes):
                return None
            if all(one.fits(size) for one in self._upper):
                return True
            return None if any(one.fits(size) for one in self._lower) else False
        except Untraceable:
            return None

    @property
    def has_run(self) -> bool:
        """True if the events of a run that fits have confirmed or corrected the program."""
        return any(run.attempt.fits for run in self._runs)

    def _fit(self) -> None:
        bounds = [*self._orders, *self._prefixes]
        self._lower = [Fitting([one.lower for one in bounds], new) for new in self._allocators]
        self._upper = [Fitting([one.upper for one in bounds], new) for new in self._allocators]


def bounds_of(
    m: int,
    trace: Trace,
    known: Program | None,
    others: Sequence[tuple[int, Trace]] = (),
    *,
    failed: bool = False,
) -> Bounds:
    """Return bounds on the memory of a step from the events of one run.

    Args:
        m: the micro-batch of the run.
        trace: its events.
        known: a program of the step that is right for most of its blocks; None if there is none.
        others: runs at other micro-batches. A line through those with the same order of events is the upper
            bound of a block. It is no lower bound, because the sizes may lie on a line by chance.
        failed: the run failed, so that smaller micro-batches are in question.
    """
    trace = trace.canonical()
    order = [(block, size == FREE) for block, size in trace.events]
    alike = [(size, one.canonical().events) for size, one in others]
    alike = [(size, events) for size, events in alike if [(b, s == FREE) for b, s in events] == order][-2:]
    points = [*(size for size, _ in alike), m]
    columns = list(zip(*(events for _, events in alike), trace.events, strict=True))
    constant = _constant_sizes(trace)
    rules: dict[int, list[Rule]] = {}
    for rule in {rule for _, rule in (known.events if known else ()) if rule is not None}:
        rules.setdefault(rule.at(m), []).append(rule)

    def growth(rule: Rule) -> int:
        return rule.at(2 * m)

    def bounds(sizes: tuple[int, ...]) -> tuple[Rule | None, Rule | None]:
        size = sizes[-1]
        if size == FREE:
            return None, None
        if size in rules:
            return min(rules[size], key=growth), max(rules[size], key=growth)
        if size in constant:
            return Polynomial(size), Polynomial(size)
        # Smaller sizes may need it all: what a trace lacks is often a library's workspace.
        grown = Polynomial(size) if failed and known else Polynomial(0, size, 0, m)
        return Polynomial(size), _line(points, sizes) or grown

    of_columns = [tuple(size for _, size in column) for column in columns]
    of_sizes = {sizes: bounds(sizes) for sizes in set(of_columns)}
    found = [(block, *of_sizes[sizes]) for (block, _), sizes in zip(trace.events, of_columns, strict=True)]
    return Bounds(
        Program(tuple((block, lower) for block, lower, _ in found), trace.marks),
        Program(tuple((block, upper) for block, _, upper in found), trace.marks),
    )


def _line(points: Sequence[int], sizes: Sequence[int]) -> Polynomial | None:
    """Return a line through the last two points, or a parabola through three if the line falls below 0."""
    if len(points) < 2:
        return None
    (small, ran), (less, most) = points[-2:], sizes[-2:]
    line = Polynomial(less * ran - most * small, most - less, 0, ran - small)
    if ran < small:
        line = Polynomial(-line.constant, -line.slope, 0, small - ran)
    if line.slope >= 0 and line.constant >= 0:
        return line
    if len(points) > 2 and line.slope >= 0:
        with suppress(Untraceable):
            return interpolate(points, sizes)
    return None


def _constant_sizes(trace: Trace) -> set[int]:
    """Return the sizes of the model's own tensors: of the setup, or else of what is never freed."""
    if trace.marks:
        start = next((index for index, phase in trace.marks if phase != "setup"), 0)
        return {size for _, size in trace.events[:start]}
    # A GPU records no phases.
    sizes = {block: size for block, size in trace.events if size != FREE}
    freed = {block for block, size in trace.events if size == FREE}
    return {sizes[block] for block in sizes.keys() - freed}
