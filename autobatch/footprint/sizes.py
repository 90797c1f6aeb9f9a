"""A step over two variables, the micro-batch and the size of its samples, and the replay of real batches.

    recordings at a few shapes ──fit──► SizeProgram ──replay──► do these real batches fit?

A recording is cut into parts: the setup, micro-batches and optimizer steps. Each part has the same events at
every shape. The bytes of a block are a polynomial in the micro-batch m and the size L of its samples:

    bytes = (a + b·L + c·L²) + m·(d + e·L + f·L²)

A replay puts parts of different shapes together to any batch. Many shapes fragment an allocator, so that a
micro-batch may run out of memory although a costlier one fits alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded
from autobatch.device.allocator.trace import FREE
from autobatch.device.profiles import USUAL_PROCESSORS
from autobatch.footprint.program import Origin, Untraceable, derived_bytes
from autobatch.footprint.tracing.trace_mode import Recording

TRACED_STEPS = (1, 1, 3)
"""Micro-batches of the steps to record: a first step, a later one, and one with several micro-batches."""
TERMS = 6
"""Terms of the polynomial."""
ROUNDING = 1e-6
"""Share of a size that solving for the coefficients in float64 may be off by."""


class Shape(NamedTuple):
    """A micro-batch: its samples, and the size that they are padded to."""

    micro_batch: int
    size: float

    def terms(self, unit: float) -> NDArray[np.float64]:
        """Return the factors of the coefficients, with L in ``unit``."""
        m, size = float(self.micro_batch), self.size / unit
        return np.array([1.0, size, size * size, m, m * size, m * size * size])


@dataclass(frozen=True)
class Part:
    """The events of a part of a step, and the sizes of the blocks that it allocates."""

    events: tuple[tuple[int, bool], ...]
    """``(block, is_free)``; blocks are numbered over all parts."""
    blocks: tuple[int, ...]
    """Blocks that it allocates, in order."""
    coefficients: NDArray[np.float64]
    """One row per block, or for each number that its size follows from."""
    unit: float
    derived: tuple[tuple[int, int, Origin], ...] = ()
    """Blocks whose size follows from numbers: place among the blocks, count of numbers, and rule."""

    @cached_property
    def frees_earlier(self) -> bool:
        """True if it frees a block of an earlier part."""
        own = set(self.blocks)
        return any(is_free and block not in own for block, is_free in self.events)

    def sizes_at(self, shape: Shape) -> list[int]:
        """Return the bytes of each block."""
        values = self.coefficients @ shape.terms(self.unit)
        found: list[int] = np.maximum(0, np.rint(values)).astype(np.int64).tolist()
        for place, count, origin in self.derived:
            numbers = found[place : place + count]
            found[place : place + count] = [derived_bytes(origin, numbers, USUAL_PROCESSORS)]
        return found

    def is_like(self, other: Part) -> bool:
        """Return whether both allocate the same blocks at every shape."""
        return self.coefficients.shape == other.coefficients.shape and np.allclose(
            self.coefficients, other.coefficients, rtol=ROUNDING, atol=1.0
        )


@dataclass(frozen=True)
class SizeProgram:
    """The parts of a step."""

    is_exact: bool
    """True if all sizes are polynomials; else some are bounded from above."""
    setup: Part
    """The model, before the first step."""
    opening: Part
    """Micro-batch of the first step."""
    opening_step: Part
    """Optimizer of the first step, whose state appears here."""
    single: Part
    """The only micro-batch of a later step."""
    single_step: Part
    first: Part
    """First of several micro-batches."""
    second: Part
    later: Part
    """Third micro-batch, or any after it."""
    step: Part
    """Optimizer after several micro-batches."""

    @property
    def is_linear(self) -> bool:
        """True if no allocation grows with the square of the size."""
        parts = [value for value in vars(self).values() if isinstance(value, Part)]
        return not any(part.coefficients[:, [2, 5]].any() for part in parts)


def fit_size_program(points: Sequence[tuple[Shape, Recording]]) -> SizeProgram:
    """Fit a program to recordings of `TRACED_STEPS` at different shapes.

    Args:
        points: the first six determine the polynomials, for example three sizes at two micro-batches each.
            More points check them. Sizes that miss a check are raised until they bound all points.

    Raises:
        Untraceable: the recordings differ in more than sizes, or their phases are not those of accumulation.
    """
    shapes, recordings = [shape for shape, _ in points], [one for _, one in points]
    orders = [tuple((block, size == FREE) for block, size in one.trace.events) for one in recordings]
    events = orders[0]
    for shape, order in zip(shapes, orders, strict=True):
        if order != events:
            raise Untraceable(
                f"the order of allocations at size {shape.size:g} ({len(order)} events) is not that at size "
                f"{shapes[0].size:g} ({len(events)} events)"
            )
    unit = max(shape.size for shape in shapes)
    coefficients, is_exact = _fit(shapes, recordings, unit)
    derived = recordings[0].derived
    counts = [
        len(derived[block].numbers) if block in derived else 1 for block, is_free in events if not is_free
    ]
    starts = [0, *accumulate(counts)]
    parts = []
    for start, stop in pairwise([0, *_bounds(recordings[0]), len(events)]):
        blocks = tuple(block for block, is_free in events[start:stop] if not is_free)
        rows = [at for block in blocks for at in range(starts[block], starts[block + 1])]
        rules = tuple(
            (place, counts[block], derived[block].origin)
            for place, block in enumerate(blocks)
            if block in derived
        )
        parts.append(Part(events[start:stop], blocks, coefficients[rows], unit, rules))
    program = SizeProgram(is_exact, *parts)
    if not program.second.is_like(program.later):
        raise Untraceable("the micro-batches of a step do not allocate alike")
    return program


def _fit(
    shapes: Sequence[Shape], recordings: Sequence[Recording], unit: float
) -> tuple[NDArray[np.float64], bool]:
    """Return the coefficients of each number, and whether all points lie on its polynomial."""
    terms = np.array([shape.terms(unit) for shape in shapes])
    sizes = np.array([_numbers_of(one) for one in recordings], float)
    if np.linalg.matrix_rank(terms[:TERMS]) < TERMS:
        raise Untraceable("the traced shapes determine no polynomial")
    rows = np.linalg.solve(terms[:TERMS], sizes[:TERMS]).T
    # Exact zeros and whole numbers stay so; the rest is rounding of the solution.
    rows[np.abs(rows) < ROUNDING * sizes.max(axis=0)[:, None]] = 0.0
    predicted = terms @ rows.T
    missed = (np.abs(np.rint(predicted) - sizes) > 0).any(axis=0)
    if not missed.any():
        return rows, True
    if (predicted[:, missed] <= 0).any():
        raise Untraceable("some allocations follow no polynomial in the size of the samples")
    raised = (sizes[:, missed] / predicted[:, missed]).max(axis=0).clip(min=1.0)
    rows[missed] *= raised[:, None]
    return rows, False


def _numbers_of(recording: Recording) -> list[int]:
    """Return the sizes of all blocks, or the numbers that these follow from."""
    found: list[int] = []
    for block, size in recording.trace.events:
        if size != FREE:
            found += recording.derived[block].numbers if block in recording.derived else [size]
    return found


def _bounds(recording: Recording) -> list[int]:
    """Return the first event of each part after the setup.

    Raises:
        Untraceable: the phases are not those of plain accumulation.
    """
    expected = ["setup"]
    for count in TRACED_STEPS:
        expected += ["forward", "backward"] * count + ["optimizer"]
    marks = recording.trace.marks
    if [phase for _, phase in marks] != expected:
        raise Untraceable("the phases of a step are not those of plain accumulation")
    return [
        _start_with_batch(recording, position) if phase == "forward" else position
        for position, phase in marks
        if phase in ("forward", "optimizer")
    ]


def _start_with_batch(recording: Recording, position: int) -> int:
    """Return the first event of a micro-batch: its batch is allocated before its forward pass is marked."""
    start = position
    for at in reversed(range(position)):
        block, size = recording.trace.events[at]
        if size != FREE and recording.labels[block].kind != "batch":
            break
        start = start if size == FREE else at
    return start


def replay_batches(
    program: SizeProgram, batches: Iterable[Sequence[Shape]], allocator: Allocator, *, most_events: int
) -> int | None:
    """Replay batches from the first step on.

    Args:
        program: the parts of a step.
        batches: the micro-batches of each batch, in order.
        allocator: empty, with the budget as its limit.
        most_events: events after which no further batch is replayed.

    Returns:
        The number of batches that were replayed; None if one does not fit.
    """
    run = _Run(program, allocator)
    count = 0
    for shapes in batches:
        if count and run.events > most_events:
            break
        try:
            run.batch(shapes, is_first=count == 0)
        except BudgetExceeded:
            return None
        count += 1
    return count


class _Run:
    """The state of a replay between two batches.

    A block keeps its traced number as a name. Micro-batches after the third repeat the third, for which the
    blocks that one of them leaves are renamed to those of the second. What a step leaves is freed at the
    first free of the next step that concerns an earlier one, or before that step if there is none.
    """

    def __init__(self, program: SizeProgram, allocator: Allocator) -> None:
        self.events = 0
        self._program = program
        self._allocator = allocator
        self._live: dict[int, Any] = {}
        """Handle of each live block, by its traced number."""
        self._left: list[Any] = []
        """Handles that earlier steps and micro-batches left."""
        self._sizes: dict[tuple[int, Shape], list[int]] = {}
        parts = (program.opening_step, program.single, program.single_step, program.first)
        freed = {block for part in parts for block, is_free in part.events if is_free}
        self._lasting = {*program.setup.blocks, *program.opening_step.blocks}
        self._lasting |= set(program.opening.blocks) - freed
        # A model that keeps tensors in its first pass allocates otherwise there than later.
        self._opens_alike = program.opening.is_like(program.first)

    def batch(self, shapes: Sequence[Shape], *, is_first: bool) -> None:
        """Run a batch.

        Raises:
            BudgetExceeded: a block does not fit.
        """
        program = self._program
        if is_first:
            self._play(program.setup, shapes[0])
            self._play(program.opening, shapes[0])
            if len(shapes) > 1 and self._opens_alike:
                self._rename(program.opening, program.first)
                self._play_rest(shapes)
                self._rename(program.first, program.opening)
            self._play(program.opening_step, shapes[-1])
        else:
            begin = program.single if len(shapes) == 1 else program.first
            if not begin.frees_earlier:
                self._free_left()
            self._play(begin, shapes[0])
            if len(shapes) > 1:
                self._play_rest(shapes)
            self._play(program.single_step if len(shapes) == 1 else program.step, shapes[-1])
        self._free_left()
        self._left = [self._live.pop(block) for block in [*self._live] if block not in self._lasting]

    def _play_rest(self, shapes: Sequence[Shape]) -> None:
        """Run the micro-batches after the first; afterwards their blocks have the names of the third."""
        program = self._program
        self._play(program.second, shapes[1])
        for shape in shapes[2:]:
            self._play(program.later, shape)
            self._rename(program.later, program.second)
        self._rename(program.second, program.later)

    def _play(self, part: Part, shape: Shape) -> None:
        """Run the events of a part at a shape."""
        key = (id(part), shape)
        if key not in self._sizes:
            self._sizes[key] = part.sizes_at(shape)
        sizes = iter(self._sizes[key])
        live, malloc, free = self._live, self._allocator.malloc, self._allocator.free
        self.events += len(part.events)
        for block, is_free in part.events:
            if not is_free:
                live[block] = malloc(next(sizes))
            elif block in live:
                free(live.pop(block))
            elif self._left:
                self._free_left()

    def _rename(self, before: Part, after: Part) -> None:
        """Give the live blocks of a part the names of another; what has these names already is left over."""
        live = self._live
        for old, new in zip(before.blocks, after.blocks, strict=True):
            if old in live:
                if new in live:
                    self._left.append(live.pop(new))
                live[new] = live.pop(old)

    def _free_left(self) -> None:
        for handle in self._left:
            self._allocator.free(handle)
        self._left.clear()
