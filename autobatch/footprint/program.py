"""A step as a program of allocations, fitted over the micro-batch.

    Trace ──fit──► Program ──at(m)──► Trace ──replay──► Replay

A training step has the same events at every micro-batch. Only their sizes differ, and each size is affine in
the micro-batch (quadratic for losses over all pairs). So two small traces give every larger one exactly. A
line through their two *peaks* does not: a peak is a maximum over phases, and reserved memory depends on
fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from math import gcd
from typing import NamedTuple, Self

from autobatch.core.errors import AutobatchError
from autobatch.device.allocator.trace import FREE, Trace

MOST_PARTS = 64
"""Most parts into which the largest common divisor of sizes is divided in search of a granule."""


class Untraceable(AutobatchError, ValueError):  # noqa: N818 - describes the step, not a fault
    """A step whose traces give no footprint, with the reason."""


class Polynomial(NamedTuple):
    """``granule · ⌈(square · m² + slope · m + constant) / denominator⌉`` bytes at micro-batch m."""

    constant: int
    slope: int = 0
    square: int = 0
    denominator: int = 1
    granule: int = 1
    """Bytes that a kernel takes at a time; 1 if sizes are a plain polynomial."""

    def at(self, m: int) -> int:
        """Return the size in bytes; 0 where the rule falls below it."""
        number = self.constant + (self.slope + self.square * m) * m
        return max(0, self.granule * -(-number // self.denominator))

    @property
    def is_exact(self) -> bool:
        """False for a mere line through two sizes, which those between and beyond need not lie on."""
        return self.denominator <= 2 or self.granule > 1


@dataclass(frozen=True, slots=True)
class Program:
    """A trace whose sizes follow rules in the micro-batch, made by `fit`."""

    events: tuple[tuple[int, Polynomial | None], ...]
    """``(block, size)`` for an allocation, ``(block, None)`` for a free."""
    marks: tuple[tuple[int, str], ...]
    modules: tuple[tuple[int, str], ...] = ()
    releases: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()

    @classmethod
    def fit(cls, points: Sequence[tuple[int, Trace]]) -> Self:
        """Fit a program to traces at different micro-batches.

        Args:
            points: ``(micro-batch, trace)``. Two give affine sizes, three or more quadratic ones; else sizes
                are multiples of one granule. Any more points check the rule. Two sizes that follow none are
                joined by a line.

        Raises:
            Untraceable: the traces differ in more than sizes, or three sizes follow no such rule.
            ValueError: fewer than two different micro-batches.
        """
        sizes_of = [m for m, _ in points]
        if len(set(sizes_of)) != len(points) or len(points) < 2:
            raise ValueError(f"a fit needs two or more different micro-batches, not {sizes_of}")
        traces = [trace.canonical() for _, trace in points]
        _check_structure(sizes_of, traces)
        rule_of = cache(partial(rule_through, sizes_of))
        events: list[tuple[int, Polynomial | None]] = []
        for column in zip(*(trace.events for trace in traces), strict=True):
            block, size = column[0]
            events.append((block, None if size == FREE else rule_of(tuple(size for _, size in column))))
        # Of a cache that has nothing to free there is no event.
        releases = {position for trace in traces for position in trace.releases}
        first = traces[0]
        return cls(tuple(events), first.marks, first.modules, tuple(sorted(releases)), first.streams)

    def at(self, m: int, *, since: int | None = None) -> Trace:
        """Return the trace at micro-batch ``m``.

        Args:
            m: the micro-batch.
            since: a smaller micro-batch from which on blocks whose rule is not exact keep their size, as the
                least that they take; None to let them grow.
        """
        # Most allocations share their rule with others, so each rule is evaluated once.
        sizes: dict[Polynomial | None, int] = {None: FREE}
        for rule in {size for _, size in self.events}:
            if rule is not None:
                sizes[rule] = rule.at(m if since is None or rule.is_exact else since)
        events = tuple((block, sizes[size]) for block, size in self.events)
        return Trace(events, self.marks, self.modules, self.releases, self.streams)


def _check_structure(micro_batches: Sequence[int], traces: Sequence[Trace]) -> None:
    first = traces[0]
    shape = [(block, size == FREE) for block, size in first.events]
    for m, trace in zip(micro_batches[1:], traces[1:], strict=True):
        other = [(block, size == FREE) for block, size in trace.events]
        if other != shape or first.marks != trace.marks or first.streams != trace.streams:
            at = next((at for at, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b), len(other))
            raise Untraceable(
                f"the events at micro-batches {micro_batches[0]} and {m} differ in more than sizes, first in "
                f"the {trace.phase_at(at) or 'setup'}"
            )


def rule_through(points: Sequence[int], sizes: Sequence[int]) -> Polynomial:
    """Return the rule of a block that has these sizes at these micro-batches, in rising order.

    Raises:
        Untraceable: there is none through three sizes.
    """
    if len(points) == 2 and sizes[1] < sizes[0]:
        return Polynomial(sizes[0])
    rule = polynomial_through(points, sizes) or _granules_through(points, sizes)
    if rule is None and len(points) > 2:
        raise Untraceable(f"sizes of {[*sizes]} bytes at micro-batches {[*points]} follow no rule")
    if rule is None:
        (m, n), (size, larger) = points, sizes
        return Polynomial(size * n - larger * m, larger - size, 0, n - m)
    return rule


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


def polynomial_through(points: Sequence[int], sizes: Sequence[int]) -> Polynomial | None:
    """Return the polynomial through the first points (at most three), on which the others must lie.

    None if they do not, or if its values are no integers. Two points give a line, or the square whose chord
    it is if the line falls below 0: a loss over all pairs of samples.
    """
    x, y = points[:3], sizes[:3]
    first = Fraction(y[1] - y[0], x[1] - x[0])
    second = Fraction(0)
    if len(x) == 3:
        second = (Fraction(y[2] - y[1], x[2] - x[1]) - first) / (x[2] - x[0])
    parts = (y[0] - first * x[0] + second * x[0] * x[1], first - second * (x[0] + x[1]), second)
    # A polynomial of degree d has integer values everywhere only over a divisor of d!.
    denominator = 2 if second else 1
    constant, slope, square = (part * denominator for part in parts)
    is_whole = all(part.denominator == 1 for part in (constant, slope, square))
    if not is_whole or (second and (parts[1] + parts[2]).denominator != 1):
        return None
    rule = Polynomial(int(constant), int(slope), int(square), denominator)
    if any(rule.at(m) != size for m, size in zip(points, sizes, strict=True)):
        return None
    if len(points) == 2 and constant < 0 and y[0] * x[1] ** 2 == y[1] * x[0] ** 2 and y[0] % x[0] ** 2 == 0:
        return Polynomial(0, 0, y[0] // x[0] ** 2)
    return rule
