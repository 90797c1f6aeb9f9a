"""A step as a program of two variables: the micro-batch, and the size of its samples.

    recordings at a few shapes ──fit──► SizeProgram ──replay──► do these real batches fit?

A recording is cut into parts: the setup, micro-batches and optimizer steps. Each part has the same events at
every shape. The bytes of a block are a polynomial in the micro-batch m and the size L of its samples:

    bytes = (a + b·L + c·L²) + m·(d + e·L + f·L²)

`autobatch.footprint.size_replay` puts parts of different shapes together to any batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.device.allocator.trace import FREE
from autobatch.device.profiles import USUAL_PROCESSORS
from autobatch.footprint.program import DerivedSize, Origin, Untraceable, derived_bytes
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


@dataclass(frozen=True)
class Part:
    """The events of a part of a step, and the sizes of the blocks that it allocates."""

    events: tuple[tuple[int, bool], ...]
    """``(block, is_free)``; blocks are numbered over all parts."""
    blocks: tuple[int, ...]
    """Blocks that it allocates, in order."""
    coefficients: NDArray[np.float64]
    """One row per block, or for each number that its size follows from: a polynomial, with L in ``unit``."""
    unit: float
    derived: tuple[tuple[int, int, Origin], ...] = ()
    """Blocks whose size follows from numbers: place among the blocks, count of numbers, and rule."""

    def sizes_at(self, shape: Shape) -> list[int]:
        """Return the bytes of each block."""
        values = self.coefficients @ _terms(shape, self.unit)
        found: list[int] = np.maximum(0, np.rint(values)).astype(np.int64).tolist()
        for place, count, origin in self.derived:
            found[place : place + count] = [
                derived_bytes(origin, found[place : place + count], USUAL_PROCESSORS)
            ]
        return found

    def is_like(self, other: Part) -> bool:
        """Return whether both allocate the same blocks at every shape."""
        return self.coefficients.shape == other.coefficients.shape and np.allclose(
            self.coefficients, other.coefficients, rtol=ROUNDING, atol=1.0
        )


@dataclass(frozen=True, kw_only=True)
class SizeProgram:
    """The parts of a step."""

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
    is_exact: bool
    """True if all sizes are polynomials; else some are bounded from above."""

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
    events = _same_events(points)
    unit = max(shape.size for shape, _ in points)
    coefficients, is_exact = _fit([shape for shape, _ in points], [one for _, one in points], unit)
    edges = [0, *_bounds(points[0][1]), len(events)]
    known = points[0][1].derived
    taken = [block for block, is_free in events if not is_free]
    starts = [0, *itertools.accumulate(_count(known, block) for block in taken)]
    parts = []
    for start, stop in itertools.pairwise(edges):
        blocks = tuple(block for block, is_free in events[start:stop] if not is_free)
        places = [at for block in blocks for at in range(starts[block], starts[block + 1])]
        rows = coefficients[places] if places else np.zeros((0, TERMS))
        derived = tuple(
            (place, _count(known, block), known[block].origin)
            for place, block in enumerate(blocks)
            if block in known
        )
        parts.append(Part(tuple(events[start:stop]), blocks, rows, unit, derived))
    setup, opening, opening_step, single, single_step, first, second, later, step = parts
    if not second.is_like(later):
        raise Untraceable("the micro-batches of a step do not allocate alike")
    return SizeProgram(
        setup=setup,
        opening=opening,
        opening_step=opening_step,
        single=single,
        single_step=single_step,
        first=first,
        second=second,
        later=later,
        step=step,
        is_exact=is_exact,
    )


def _terms(shape: Shape, unit: float) -> NDArray[np.float64]:
    m, size = float(shape.micro_batch), shape.size / unit
    return np.array([1.0, size, size * size, m, m * size, m * size * size])


def _same_events(points: Sequence[tuple[Shape, Recording]]) -> list[tuple[int, bool]]:
    """Return the events that all recordings share: a block, and whether it is freed.

    Raises:
        Untraceable: they differ.
    """
    columns = [[(block, size == FREE) for block, size in one.trace.events] for _, one in points]
    for (shape, _), other in zip(points[1:], columns[1:], strict=True):
        if other != columns[0]:
            raise Untraceable(
                f"the order of allocations at size {shape.size:g} ({len(other)} events) is not that at size "
                f"{points[0][0].size:g} ({len(columns[0])} events)"
            )
    return columns[0]


def _fit(
    shapes: Sequence[Shape], recordings: Sequence[Recording], unit: float
) -> tuple[NDArray[np.float64], bool]:
    """Return the coefficients of each block, and whether all points lie on its polynomial.

    Raises:
        Untraceable: the shapes determine no polynomial, or a size is far from any.
    """
    terms = np.array([_terms(shape, unit) for shape in shapes])
    sizes = np.array([_sizes_of(one) for one in recordings], float)
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
    start, at = position, position - 1
    events = recording.trace.events
    while at >= 0:
        block, size = events[at]
        if size != FREE:
            if recording.labels[block].kind != "batch":
                break
            start = at
        at -= 1
    return start


def _count(derived: Mapping[int, DerivedSize], block: int) -> int:
    """Return how many numbers the size of a block follows from."""
    return len(derived[block].numbers) if block in derived else 1


def _sizes_of(recording: Recording) -> list[int]:
    """Return the sizes of all blocks, or the numbers that these follow from."""
    found: list[int] = []
    for block, size in recording.trace.events:
        if size != FREE:
            found += recording.derived[block].numbers if block in recording.derived else [size]
    return found
