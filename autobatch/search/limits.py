"""Predictions of the largest micro-batch, from a trace and from the attempts that have run.

The best prediction replays allocation events that are exact polynomials in the micro-batch. If libraries
take scratch that follows no polynomial, the events are replayed twice, with the scratch bounded from below
and from above. Only a replay that a run has confirmed may prove that a size does not fit, and both bounds
must agree. If no events are known, the guess is a line through the two largest peaks, which is off by up to
27 % because memory is a maximum over phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import Trace
from autobatch.footprint.largest import Fitting, largest_micro_batch
from autobatch.footprint.program import Program, Untraceable
from autobatch.footprint.scratch import Envelope, in_proportion, order_of_tensors
from autobatch.search.peaks import peak_bytes
from autobatch.setup.attempt import Outcome

FIRST_SIZE = 2
"""The first size to run, because 1 is a special case for many operators (broadcasting, batch statistics)."""
FIRST_SIZE_ON_GPU = 8
"""The first size on a GPU, whose libraries have special cases for small sizes."""
DISTANCES = (29, 23, 19, 17, 13, 11, 7, 5, 3, 2, 1)
"""Distances from the first size to the second: far enough for exact slopes and small enough to be quick. They
are prime, so that sizes that a library rounds rarely seem to grow by whole bytes per sample."""
ENOUGH_POINTS = 3
"""Number of sizes that shows whether the events are lines, parabolas or neither."""
FAR = 4
"""Ratio of a size that did not fit to the largest that did, above which the limit may lie anywhere."""
NEAR = 1.1
"""Ratio of a size predicted in proportion to the largest that ran, up to which it is taken as it is."""
CAREFUL = 0.7
"""Share of the way to such a size that is taken if it is further."""
AGREES = 0.03
"""Distance of the sizes that two runs predict in proportion, as a share, up to which they are trusted."""
NEIGHBOURS = 16
"""Sizes are neighbours if they differ by less than one part in this many."""
REFUSED_SHARE = 1 / 16
"""Share of the budget that a prediction leaves free after a size did not fit; doubled each time. Scratch that
small sizes do not show takes about as much."""


class ReplayPredictor:
    """Prediction by replaying the events of attempts at other sizes.

    Args:
        new_allocator: makes an empty allocator with the device's budget.
        program: the traced events of an attempt; None if it was not traced.
        other_order: traces the other order; called once a size fails in that order only.
        first_size: the first size to run without any prediction.
    """

    def __init__(
        self,
        new_allocator: Callable[[], Allocator],
        program: Program | None = None,
        other_order: Callable[[], Program | None] = lambda: None,
        first_size: int = FIRST_SIZE,
    ) -> None:
        self._new_allocator = new_allocator
        self._first_size = first_size
        self._program = program
        self._predict_other = other_order
        self._other: Program | None = None
        self._envelope: Envelope | None = None
        """Bounds in place of the program, if no program fits all events."""
        self._confirmed = False
        self._refusals = 0
        """Sizes that did not fit since the last that did."""
        self._refused = 0
        """The last size that did not fit."""
        self._points: list[tuple[int, Trace]] = []
        self._orders: list[int] = []
        """Orders of the tensors of the first points, as far as they were asked for."""
        self._peaks: dict[int, int] = {}
        self._live: dict[int, int] = {}
        """Peaks of the bytes in live blocks, without what the allocator keeps beside them."""

    def learn(self, outcome: Outcome) -> None:
        """Check the program against an attempt, and fit another if they differ."""
        size, peak = outcome.attempt.micro_batch, peak_bytes(outcome.attempt)
        if not outcome.attempt.fits:
            if outcome.trace is not None and self._agrees(size, outcome.trace):
                # It ran, and failed in the other order.
                self._other = self._other or self._predict_other()
            self._refusals += 1
            self._refused = size
            return
        self._refusals = 0
        if self._other and outcome.other and not self._other.agrees_with(size, outcome.other):
            self._other = None
        if peak is not None:
            self._peaks[size] = peak
            self._live[size] = outcome.attempt.peak_allocated_bytes or peak
        if outcome.trace is None:
            return
        trace = outcome.trace.canonical()
        self._points.append((size, trace))
        if self._agrees(size, trace):
            self._confirmed = True
            return
        self._confirmed = False
        is_chance = self._agrees_by_chance()
        self._program = None if is_chance else self._fit()
        self._envelope = None if is_chance or self._program is not None else self._bound()

    def next_calibration_size(self, cap: int) -> int | None:
        """Return a size up to ``cap`` that probably fits and improves the prediction; None if enough ran."""
        known = sorted(self._peaks)
        if not known:
            return min(FIRST_SIZE if self._refusals else self._first_size, cap)
        budget = self._new_allocator().limit
        if len(known) == 1 and budget is not None:
            if known[0] > self._first_size + DISTANCES[0]:
                # An inexact prediction led here, and smaller sizes fit.
                return known[0] - DISTANCES[0]
            room = self._in_proportion(known[0], cap) - known[0]
            return known[0] + next((distance for distance in DISTANCES if distance <= room), 1)
        undecided = (self._envelope is None or self._needs_points) and not self._confirmed
        undecided = undecided and not self._changes_order
        # Far below a refusal, the next size upward is a better third point than one between two small ones.
        is_far = self._refusals and self._refused > FAR * known[-1]
        if undecided and self._refusals < 2 and not is_far and 0 < len(self._points) < ENOUGH_POINTS:
            between = (known[-2] + known[-1]) // 2
            if between > known[-2]:
                return between
            room = self._in_proportion(known[-1], cap) - known[-1]
            return known[-1] + max(1, min(2, room))
        return None

    def largest(self, cap: int) -> int | None:
        """Predict the largest micro-batch that fits, at most ``cap`` and possibly 0; None if unknown."""
        if self._program is not None:
            # A trace that the first run refuted misses a little more often than a lot. One that agrees with
            # that run needs the other order only.
            is_refuted = self._refusals == 1 and not self._points and self._other is None
            program = self._with_room(self._program) if is_refuted else self._program
            try:
                return largest_micro_batch(program, self._new_allocator, cap, other=self._other)
            except Untraceable:
                self._program = None
        if self._envelope is not None and not self._needs_points:
            return self._largest_within(self._envelope, cap)
        if self._points and (len(self._points) >= ENOUGH_POINTS or self._changes_order):
            return self._in_proportion_to_largest(cap)
        return None if self._points else self._from_peaks(cap)

    @property
    def _changes_order(self) -> bool:
        """True if no two runs have the same order of tensors, so that a third one hardly gives a program."""
        return len(self._points) > 1 and len(set(self._orders_of(self._points))) == len(self._points)

    def _orders_of(self, points: Sequence[tuple[int, Trace]]) -> list[int]:
        """Return the orders of the tensors of the first points."""
        known = len(self._orders)
        self._orders += [order_of_tensors(trace) for _, trace in points[known:]]
        return self._orders[: len(points)]

    @property
    def is_rough(self) -> bool:
        """True if no program follows from the runs: the order of allocations depends on the data's values."""
        return len(self._points) > 1 and self._program is None

    @property
    def _needs_points(self) -> bool:
        """True if a size that bounds from too few points allowed did not fit: memory bends between them."""
        return self._refusals > 0 and len(self._points) < ENOUGH_POINTS

    def proves_next_fails(self, micro_batch: int) -> bool:
        """Return whether ``micro_batch + 1`` does not fit according to a program that a run has confirmed."""
        return self._next_fits(micro_batch) is False

    def says_next_fits(self, outcome: Outcome) -> bool | None:
        """Return whether one sample more than in an attempt fits; None if no program agrees with the attempt.

        A size that fails in either order of an attempt does not fit.
        """
        self.learn(outcome)
        size = outcome.attempt.micro_batch
        if self._next_fits(size) and self._other is None:
            other = self._predict_other()
            if other and outcome.other and other.agrees_with(size, outcome.other):
                self._other = other
        return self._next_fits(size)

    def _next_fits(self, micro_batch: int) -> bool | None:
        """Return whether ``micro_batch + 1`` fits; None if no run has confirmed that, or bounds differ."""
        bounds = self._envelope
        if bounds is not None and bounds.is_checked and bounds.largest == micro_batch:
            found = {self._fits(bound, micro_batch + 1) for bound in (bounds.seen, bounds.upper)}
            return found.pop() if len(found) == 1 else None
        if self._program is None or not self._confirmed:
            return None
        fits = self._fits(self._program, micro_batch + 1)
        return fits if self._other is None or not fits else self._fits(self._other, micro_batch + 1)

    def _fits(self, program: Program, micro_batch: int) -> bool | None:
        try:
            return Fitting([program], self._new_allocator).fits(micro_batch)
        except Untraceable:
            return None

    def _agrees(self, size: int, trace: Trace) -> bool:
        return self._program is not None and self._program.agrees_with(size, trace)

    def _largest_within(self, bounds: Envelope, cap: int) -> int:
        """Return the largest that fits with the most scratch."""
        most = self._with_room(bounds.upper) if self._refusals else bounds.upper
        return largest_micro_batch(most, self._new_allocator, cap)

    def _with_room(self, program: Program) -> Program:
        """Return a program with a block for what a prediction leaves free after refusals."""
        budget = self._new_allocator().limit or 0
        return program.with_blocks([(0, int(budget * min(REFUSED_SHARE * 2 ** (self._refusals - 1), 1)))])

    def _in_proportion(self, known: int, cap: int) -> int:
        """Return a size that fits, because memory has a fixed part and grows less than proportionally."""
        budget = self._new_allocator().limit
        return cap if budget is None else min(cap, known * budget // max(self._live[known], 1))

    def _in_proportion_to_largest(self, cap: int) -> int:
        """Return the largest size that fits if memory grows in proportion to that of the largest run."""
        *_, (before, early), (size, trace) = [(0, None), *sorted(self._points, key=lambda point: point[0])]
        guess = largest_micro_batch(in_proportion(size, trace), self._new_allocator, cap)
        if guess <= NEAR * size:
            return guess
        if early is not None:
            other = largest_micro_batch(in_proportion(before, early), self._new_allocator, cap)
            if abs(other - guess) <= AGREES * guess:
                return min(other, guess)
        return size + int(CAREFUL * (guess - size))

    def _fit(self) -> Program | None:
        """Fit a line to two sizes, else a parabola to three; None if neither holds, or for too few."""
        points = sorted(self._points, key=lambda point: point[0])
        for count in (2, ENOUGH_POINTS):
            latest = points[-count:]
            if len(latest) < count:
                return None
            try:
                program = Program.fit(latest)
            except Untraceable:
                continue
            if count == len(points) and program.bends():
                return None
            # Smaller sizes may differ only if they take other steps. If a library rounds, sizes of one kind
            # (for example odd ones) lie on a line and the others do not.
            alike = [point for point in points if len(point[1].canonical().events) == len(program.events)]
            if all(program.agrees_with(*point) for point in [*alike, *latest]):
                return program
        return None

    def _agrees_by_chance(self) -> bool:
        """Return whether neighbours alone have one order, where all other runs have orders of their own.

        Then the values of the data decide on the order, and a line through neighbours misses far from them.
        """
        orders = self._orders_of(self._points)
        alike = [size for (size, _), order in zip(self._points, orders, strict=True) if order == orders[-1]]
        others = [order for order in orders if order != orders[-1]]
        if len(others) < ENOUGH_POINTS or len(set(others)) < len(others):
            return False
        return max(alike) * NEIGHBOURS < min(alike) * (NEIGHBOURS + 1)

    def _bound(self) -> Envelope | None:
        """Bound the scratch of libraries, and fit the rest; None for too few runs."""
        if len(self._points) < 2:
            return None
        try:
            return Envelope.fit(self._points)
        except Untraceable:
            return None

    def _from_peaks(self, cap: int) -> int | None:
        """Return where the line through the two largest peaks meets the budget; None if unknown."""
        budget = self._new_allocator().limit
        if len(self._peaks) < 2 or budget is None:
            return None
        (small, low), (large, high) = sorted(self._peaks.items())[-2:]
        if high <= low:
            return None
        return min(cap, large + (budget - high) * (large - small) // (high - low))


def first_size(compute_capability: tuple[int, int] | None) -> int:
    """Return the first size to run without any prediction; None stands for a CPU."""
    return FIRST_SIZE if compute_capability is None else FIRST_SIZE_ON_GPU
