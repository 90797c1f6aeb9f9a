"""The replay of a step, which tells what fits and which every run confirms or corrects.

    trace ──► program ──replay──► guess ──run──► events: equal? confirmed; else the program is built anew

A run that takes other memory than was traced is the better trace. Its events are taken as they are, and only
their sizes at other micro-batches are inferred: a block that has a size of the program keeps its rule, one
of the model's own tensors is constant, and any other one is bounded by its size from below and by growth in
proportion to the micro-batch from above. Guesses take the upper bound, and proofs the lower one.

A GPU's driver decides where segments lie, on which the choice among free blocks of the same size depends. So
there may be several models of the allocator. A run with the events of the program refutes those in which it
ends otherwise, and a proof takes all that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.largest import Fitting
from autobatch.footprint.program import Polynomial, Program, Rule, Untraceable
from autobatch.setup.attempt import Outcome

MISS = 16
"""A first prediction that is refuted is lowered by one part in this many: traces miss little."""


class Bounds(NamedTuple):
    """Programs of a step that bound its memory; equal where its events are known at every micro-batch."""

    lower: Program
    upper: Program


class Replay:
    """A prediction of what fits, by a program that runs correct.

    Args:
        new_allocator: makes an empty allocator with the device's budget.
        program: the traced events of an attempt; None if it was not traced.
        other_order: traces the other order; called once a size fails in that order only.
        other_allocators: the same for other models of the allocator, each of which may be the right one.
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
        """What no run has refuted, the likeliest first."""
        self._traced = program
        self._other_order = other_order
        self._orders = [] if program is None else [Bounds(program, program)]
        self._runs: list[tuple[int, Trace]] = []
        """Runs that fit, with their events."""
        self._allocated: dict[int, int] = {}
        """Peaks of the bytes in live blocks, by size."""
        self._failed: list[int] = []
        self._prefixes: list[Bounds] = []
        """The events of the last failure up to it, until a run fits."""
        self._is_right = True
        """False if the last run fitted, and was not to fit."""
        self._fit()

    def learn(self, outcome: Outcome) -> None:
        """Confirm or correct the program by an attempt."""
        attempt = outcome.attempt
        size = attempt.micro_batch
        if not attempt.fits:
            self._failed.append(size)
            self._learn_failure(size, outcome)
            return
        if attempt.peak_allocated_bytes:
            self._allocated[size] = attempt.peak_allocated_bytes
        if outcome.trace is None:
            return
        trace = outcome.trace.canonical()
        self._is_right = self._says_upper_fits(size)
        self._runs.append((size, trace))
        if size < max(ran for ran, _ in self._runs):
            return
        if self._agrees(size, trace):
            # What was fitted to other runs is confirmed now.
            self._orders[0] = Bounds(self._orders[0].upper, self._orders[0].upper)
        else:
            try:
                self._orders = [self._corrected(size, trace)]
                if outcome.other is not None:
                    self._orders.append(bounds_of(size, outcome.other, self._traced))
            except Untraceable:
                self._orders = []
        self._prefixes = []
        self._refute(size, fits=True)
        self._fit()

    def _learn_failure(self, size: int, outcome: Outcome) -> None:
        """Take the events up to the failure into account, which bound what follows."""
        has_run = outcome.attempt.phase is None or outcome.other is not None
        if has_run and len(self._orders) == 1 and outcome.trace and self._agrees(size, outcome.trace):
            # It ran in one order, and failed in the other.
            other = self._other_order()
            self._orders += [] if other is None else [Bounds(other, other)]
        elif outcome.attempt.phase is not None and not self._runs:
            ran = outcome.trace if outcome.other is None else outcome.other
            if ran is not None:
                self._prefixes = [bounds_of(size, _with_request(ran, outcome.requested_bytes), self._traced)]
        is_known = bool(self._orders) and (not has_run or len(self._orders) > 1)
        if is_known and outcome.trace and _begins(self._orders[0].upper, size, outcome.trace):
            self._refute(size, fits=False)
        self._fit()

    def _refute(self, size: int, *, fits: bool) -> None:
        """Leave out the models of the allocator in which a run with known events ends otherwise."""
        programs = [one.upper for one in self._orders]
        try:
            right = [new for new in self._allocators if Fitting(programs, new).fits(size) is fits]
        except Untraceable:
            return
        self._allocators = right or self._allocators

    def largest(self, cap: int) -> int | None:
        """Predict the largest micro-batch up to ``cap`` that fits, possibly 0; None if nothing is known."""
        found = [one for one in (self._by_events(cap), self._by_bytes(cap)) if one is not None]
        return max(found) if self._runs and found else next(iter(found), None)

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
        # What is known misses what made it fail. Until a run shows that, the two sizes alone count.
        if high < 2 * low and low - 1 not in self._allocated:
            # The size that ran is probably the largest, which one run shows.
            return low + 1
        return high - max(1, (high - low) // MISS) if len(self._failed) == 1 else (low + high) // 2

    def _by_events(self, cap: int) -> int | None:
        """Return the largest size whose replay fits; None if no events are known."""
        if not (self._orders or self._prefixes):
            return None
        try:
            return self._upper[0].largest(cap)
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
        """True if the events of a run have confirmed or corrected the program."""
        return bool(self._runs)

    def _says_upper_fits(self, size: int) -> bool:
        try:
            return self._upper[0].fits(size)
        except Untraceable:
            return False

    def _agrees(self, size: int, trace: Trace) -> bool:
        return bool(self._orders) and _agree(self._orders[0].upper, size, trace)

    def _corrected(self, size: int, trace: Trace) -> Bounds:
        """Return bounds from the events of a run; above, a line through it and another run if there is one.

        That line may be chance, so that it proves nothing until a further run agrees with it.
        """
        bounds = bounds_of(size, trace, self._traced)
        for runs in (self._runs[-2:], self._runs[-3:]):
            if len(runs) > 1:
                try:
                    program = Program.fit(runs)
                except Untraceable:
                    continue
                if not program.bends():
                    return bounds._replace(upper=program)
        return bounds

    def _fit(self) -> None:
        bounds = [*self._orders, *self._prefixes]
        self._lower = [Fitting([one.lower for one in bounds], new) for new in self._allocators]
        self._upper = [Fitting([one.upper for one in bounds], new) for new in self._allocators]


def _agree(program: Program, m: int, trace: Trace) -> bool:
    """Return whether a run has the events of a program; those that a GPU records have no phases."""
    try:
        traced = program.at(m)
    except Untraceable:
        return False
    if not trace.marks:
        traced = Trace(traced.events)
    return traced.canonical().events == trace.canonical().events


def _begins(program: Program, m: int, trace: Trace) -> bool:
    """Return whether a run that failed has the first events of a program."""
    try:
        traced = program.at(m).without_empty().events
    except Untraceable:
        return False
    ran = trace.without_empty().events
    return ran == traced[: len(ran)]


def _with_request(trace: Trace, requested_bytes: int | None) -> Trace:
    """Return the events up to a failure, followed by the request that failed."""
    if requested_bytes is None:
        return trace
    ran = trace.canonical()
    block = 1 + max((block for block, _ in ran.events), default=-1)
    return Trace((*ran.events, (block, requested_bytes)), ran.marks)


def bounds_of(m: int, trace: Trace, known: Program | None) -> Bounds:
    """Return bounds on the memory of a step from the events of one run.

    Args:
        m: the micro-batch of the run.
        trace: its events.
        known: a program of the step that is right for most of its blocks; None if there is none.
    """
    trace = trace.canonical()
    rules = _rules_at(m, known)
    constant = _constant_sizes(trace)
    lower: dict[int, Rule | None] = {FREE: None}
    upper: dict[int, Rule | None] = {FREE: None}
    for size in {size for _, size in trace.events} - {FREE}:
        same = rules.get(size)
        grown = Polynomial(size) if size in constant else Polynomial(0, size, 0, m)
        lower[size] = min(same, key=lambda rule: rule.at(2 * m)) if same else Polynomial(size)
        upper[size] = max(same, key=lambda rule: rule.at(2 * m)) if same else grown
    return Bounds(
        Program(tuple((block, lower[size]) for block, size in trace.events), trace.marks),
        Program(tuple((block, upper[size]) for block, size in trace.events), trace.marks),
    )


def _rules_at(m: int, program: Program | None) -> dict[int, list[Rule]]:
    """Return the rules of a program by the size that they give."""
    rules: dict[int, list[Rule]] = {}
    for rule in {rule for _, rule in (program.events if program else ())} - {None}:
        assert rule is not None
        rules.setdefault(rule.at(m), []).append(rule)
    return rules


def _constant_sizes(trace: Trace) -> set[int]:
    """Return the sizes of the model's own tensors: of the setup, or else of what is never freed."""
    if trace.marks:
        start = next((index for index, phase in trace.marks if phase != "setup"), 0)
        return {size for _, size in trace.events[:start]}
    # A GPU records no phases.
    sizes = {block: size for block, size in trace.events if size != FREE}
    freed = {block for block, size in trace.events if size == FREE}
    return {sizes[block] for block in sizes.keys() - freed}
