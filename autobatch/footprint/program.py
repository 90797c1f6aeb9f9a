"""A step as a program of allocations, fitted over the micro-batch.

    Trace ──fit──► Program ──at(m)──► Trace ──replay──► Replay

A training step has the same events at every micro-batch. Only their sizes differ, and each size is affine in
the micro-batch (quadratic for losses over all pairs). So two small traces give every larger one exactly. A
line through their two *peaks* does not: a peak is a maximum over phases, and reserved memory depends on
fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import Literal, NamedTuple, Self, TypeAlias

import msgspec

from autobatch.core.errors import AutobatchError
from autobatch.device.allocator.onednn_workspace import whole_pages
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.device.profiles import USUAL_PROCESSORS, Processors
from autobatch.footprint.reductions import Reduction, scratch_bytes

MOST_PARTS = 64
"""Most parts into which the largest common divisor of sizes is divided in search of a granule."""


class Untraceable(AutobatchError, ValueError):  # noqa: N818 - describes the step, not a fault
    """A step whose traces give no footprint, with the reason."""


class TooLong(Untraceable):
    """A step that takes too long to trace: it has too many operators, or its model too many parameters."""


class Polynomial(NamedTuple):
    """``granule · ⌈(square · m² + slope · m + constant) / denominator⌉`` bytes at micro-batch m."""

    constant: int
    slope: int = 0
    square: int = 0
    denominator: int = 1
    granule: int = 1
    """Bytes that a kernel takes at a time; 1 if sizes are a plain polynomial."""

    def at(self, m: int) -> int:
        """Return the size in bytes.

        Raises:
            Untraceable: the size would be negative, so the rule is invalid there.
        """
        size = self.granule * -(-(self.constant + (self.slope + self.square * m) * m) // self.denominator)
        if size < 0:
            raise Untraceable(f"an allocation would have {size} bytes at micro-batch {m}")
        return size

    def plus(self, size: int) -> Polynomial:
        """Return the rule with this many more bytes."""
        return self._replace(constant=self.constant + size * self.denominator)


Origin = Literal["pages", "staging", "semaphores"]
"""The rule behind a derived size: oneDNN's workspaces (`whole_pages`), and the scratch of CUDA's reductions
(`autobatch.footprint.reductions`)."""


class Derived(msgspec.Struct, frozen=True):
    """Bytes that follow from numbers which are polynomials in the micro-batch, by a library's own rule."""

    origin: Origin
    numbers: tuple[Polynomial, ...]
    processors: Processors = USUAL_PROCESSORS
    """Of the GPU."""

    def at(self, m: int) -> int:
        """Return the size in bytes; see `Polynomial.at`."""
        return derived_bytes(self.origin, [number.at(m) for number in self.numbers], self.processors)

    def plus(self, size: int) -> Self:
        """Return the rule with this many more bytes.

        Raises:
            Untraceable: there is no such rule.
        """
        if size:
            raise Untraceable(f"the memory of {self.origin} grows by another part")
        return self


def derived_bytes(origin: Origin, numbers: Sequence[int], processors: Processors) -> int:
    """Return the size of a block that follows from numbers."""
    if origin == "pages":
        return whole_pages(tuple(numbers))
    return scratch_bytes(Reduction.of(numbers), processors)[origin == "semaphores"]


Rule: TypeAlias = Polynomial | Derived


class DerivedSize(NamedTuple):
    """The origin of the size of one block."""

    origin: Origin
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A trace whose sizes are polynomials in the micro-batch, made by `fit`."""

    events: tuple[tuple[int, Rule | None], ...]
    """``(block, size)`` for an allocation, ``(block, None)`` for a free."""
    marks: tuple[tuple[int, str], ...]
    modules: tuple[tuple[int, str], ...] = ()

    @classmethod
    def fit(
        cls, points: Sequence[tuple[int, Trace]], derived: Sequence[Mapping[int, DerivedSize]] = ()
    ) -> Self:
        """Fit a program to traces at different micro-batches.

        Args:
            points: ``(micro-batch, trace)``. Two give affine sizes, three or more quadratic ones; else sizes
                are multiples of one granule. Any more points check the rule.
            derived: for each point the blocks whose sizes follow from numbers; empty if there are none.

        Raises:
            Untraceable: the traces differ in more than sizes, or the sizes follow no such polynomial.
            ValueError: fewer than two different micro-batches.
        """
        sizes_of = [m for m, _ in points]
        if len(set(sizes_of)) != len(points) or len(points) < 2:
            raise ValueError(f"a fit needs two or more different micro-batches, not {sizes_of}")
        traces = [trace.canonical() for _, trace in points]
        _same_structure(sizes_of, traces)
        events: list[tuple[int, Rule | None]] = []
        known: dict[tuple[int, ...], Polynomial] = {}
        rules: dict[int, Derived] = {}
        for block, (origin, _) in (derived[0] if derived else {}).items():
            numbers = zip(*(one[block].numbers for one in derived), strict=True)
            rules[block] = Derived(origin, tuple(interpolate(sizes_of, each) for each in numbers))
        for column in zip(*(trace.events for trace in traces), strict=True):
            block, size = column[0]
            if size == FREE:
                events.append((block, None))
                continue
            if block in rules:
                events.append((block, rules[block]))
                continue
            sizes = tuple(event[1] for event in column)
            if sizes not in known:
                known[sizes] = rule_through(sizes_of, sizes)
            events.append((block, known[sizes]))
        return cls(tuple(events), traces[0].marks, traces[0].modules)

    def on(self, processors: Processors) -> Self:
        """Return the program with the scratch of a GPU's reductions."""
        on_gpu = {
            rule: msgspec.structs.replace(rule, processors=processors)
            for _, rule in self.events
            if isinstance(rule, Derived)
        }
        if not on_gpu:
            return self
        events = tuple(
            (block, on_gpu[rule] if isinstance(rule, Derived) else rule) for block, rule in self.events
        )
        return replace(self, events=events)

    def with_blocks(self, blocks: Sequence[tuple[int, int]], *, are_freed: bool) -> Self:
        """Return the program with further blocks: the workspaces of libraries.

        Args:
            blocks: ``(number of events before the allocation, size in bytes)``, in order.
            are_freed: True if each is freed at once, False if never.
        """
        number = 1 + max((block for block, _ in self.events), default=-1)
        events: list[tuple[int, Rule | None]] = []
        before = 0
        for block, (place, size) in enumerate(sorted(blocks, key=lambda one: one[0]), number):
            events += [*self.events[before:place], (block, Polynomial(size))]
            events += [(block, None)] * are_freed
            before = place
        events += self.events[before:]
        places = [place for place, _ in blocks]
        each = 2 if are_freed else 1
        marks = tuple((at + each * sum(place < at for place in places), phase) for at, phase in self.marks)
        return type(self)(tuple(events), marks)

    def at(self, m: int) -> Trace:
        """Return the trace at micro-batch ``m``.

        Raises:
            Untraceable: a size would be negative there.
        """
        # Most allocations share their rule with others, so each rule is evaluated once.
        sizes: dict[Rule | None, int] = {None: FREE}
        for rule in {size for _, size in self.events}:
            if rule is not None:
                sizes[rule] = rule.at(m)
        return Trace(tuple((block, sizes[size]) for block, size in self.events), self.marks, self.modules)

    def begins_with(self, m: int, trace: Trace) -> bool:
        """Return True if the program at micro-batch ``m`` begins with ``trace`` up to its last event."""
        events = trace.canonical().events
        try:
            return self.at(m).events[: len(events)] == events
        except Untraceable:
            return False

    def agrees_with(self, m: int, trace: Trace) -> bool:
        """Return True if ``trace`` has the events of the program at micro-batch ``m``.

        The phases count only if the trace has any: a GPU records none.
        """
        try:
            expected = self.at(m)
        except Untraceable:
            return False
        if not trace.marks:
            expected = Trace(expected.events)
        expected, found = expected.without_empty(), trace.without_empty()
        return (expected.events, expected.marks) == (found.events, found.marks)


def _same_structure(micro_batches: Sequence[int], traces: Sequence[Trace]) -> None:
    first = traces[0]
    for m, trace in zip(micro_batches[1:], traces[1:], strict=True):
        shapes = [[(block, size == FREE) for block, size in one.events] for one in (first, trace)]
        if shapes[0] != shapes[1] or first.marks != trace.marks:
            at = next((i for i, pair in enumerate(zip(*shapes, strict=False)) if pair[0] != pair[1]), None)
            where = min(map(len, shapes)) if at is None else at
            raise Untraceable(
                f"the order of allocations at micro-batch {m} ({len(trace.events)} events) is not that at "
                f"{micro_batches[0]} ({len(first.events)} events): they differ first at event {where}, in "
                f"{trace.phase_at(where) or 'no phase'}"
            )


def rule_through(points: Sequence[int], sizes: Sequence[int]) -> Polynomial:
    """Return the rule of a block that has these sizes at these micro-batches.

    Raises:
        Untraceable: there is none.
    """
    try:
        line = interpolate(points, sizes)
    except Untraceable:
        granules = _granules_through(points, sizes)
        if granules is None:
            raise
        return granules
    if line.constant < 0 and len(points) == 2:
        # A line that falls below 0 is the chord of a parabola: a loss over all pairs of samples.
        (m, n), (size, larger) = points, sizes
        if size * n * n == larger * m * m and size % (m * m) == 0:
            return Polynomial(0, 0, size // (m * m))
    return line


def _granules_through(points: Sequence[int], sizes: Sequence[int]) -> Polynomial | None:
    """Return the rule of the largest granule that is taken for a power of two samples; None if none is."""
    common = gcd(*sizes)
    if not all(sizes):
        return None
    for granule in (common // part for part in range(1, 1 + MOST_PARTS) if common % part == 0):
        counts = [size // granule for size in sizes]
        most = min((m - 1) // (count - 1) for m, count in zip(points, counts, strict=True) if count > 1)
        rule = Polynomial(0, 1, 0, 1 << max(0, most.bit_length() - 1), granule)
        if [rule.at(m) for m in points] == [*sizes]:
            return rule
    return None


def interpolate(points: Sequence[int], sizes: Sequence[int]) -> Polynomial:
    """Return the polynomial through the first points (at most three), on which the others must lie.

    Raises:
        Untraceable: they do not, or its values are no integers.
    """
    x, y = points[:3], sizes[:3]
    first = Fraction(y[1] - y[0], x[1] - x[0])
    second = Fraction(0)
    if len(x) == 3:
        second = (Fraction(y[2] - y[1], x[2] - x[1]) - first) / (x[2] - x[0])
    parts = (y[0] - first * x[0] + second * x[0] * x[1], first - second * (x[0] + x[1]), second)
    # A polynomial of degree d has integer values everywhere only over a divisor of d!.
    denominator = 2 if second else 1
    if any((part * denominator).denominator != 1 for part in parts) or (
        second and (parts[1] + parts[2]).denominator != 1
    ):
        raise Untraceable(f"an allocation has {[*sizes]} bytes at micro-batches {[*points]}: no integer rule")
    constant, slope, square = (int(part * denominator) for part in parts)
    rule = Polynomial(constant, slope, square, denominator)
    if any(rule.at(m) != size for m, size in zip(points, sizes, strict=True)):
        raise Untraceable(f"an allocation has {[*sizes]} bytes at micro-batches {[*points]}: no polynomial")
    return rule
