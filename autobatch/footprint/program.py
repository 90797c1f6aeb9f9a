"""A step as a program of allocations, fitted over the micro-batch.

    Trace ──fit──► Program ──at(m)──► Trace ──replay──► Replay
    Program ──live bytes──► bound ──replays──► m fits, and m + 1 does not

A training step has the same events at every micro-batch. Only their sizes differ, and each size is affine in
the micro-batch (quadratic for losses over all pairs). So two small traces give every larger one exactly. A
line through their two *peaks* does not: a peak is a maximum over phases, and reserved memory depends on
fragmentation.

Recordings of a program by others differ in a few blocks: the scratch of a long sum, a library's workspace in
the first run. So they are aligned, and such blocks are taken as in the largest recording:

    Recording at 8 ─┐
                    ├─ blocks in pairs ─► one order of events, that of the largest ─► Program
    Recording at 16 ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple, Self

import numpy as np

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.largest import largest
from autobatch.device.allocator import Allocator
from autobatch.device.trace import FREE, Recording, Trace, line_of, replay

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

    trace: Trace
    """The trace of one micro-batch."""
    rules: tuple[Polynomial, ...]
    """The size of each block, by its number."""

    @classmethod
    def fit(cls, points: Sequence[tuple[int, Trace]]) -> Self:
        """Fit a program to traces at two or more different micro-batches.

        Args:
            points: ``(micro-batch, trace)``. Two give affine sizes, three or more quadratic ones; else sizes
                are multiples of one granule. Any more points check the rule. Two sizes that follow none are
                joined by a line.

        Raises:
            Untraceable: the traces differ in more than sizes, or three sizes follow no such rule.
        """
        sizes, traces = zip(*points, strict=True)
        if len(set(map(structure_of, traces))) > 1:
            raise Untraceable(f"the events at micro-batches {[*sizes]} differ in more than sizes")
        rule_of = cache(partial(rule_through, sizes))
        rules = tuple(map(rule_of, zip(*map(block_sizes, traces), strict=True)))
        # Of a cache that has nothing to free there is no event.
        releases = {position for trace in traces for position in trace.releases}
        return cls(replace(traces[0], releases=tuple(sorted(releases))), rules)

    def at(self, m: int, *, since: int | None = None) -> Trace:
        """Return the trace at micro-batch ``m``.

        Args:
            m: the micro-batch.
            since: a smaller micro-batch from which on blocks whose rule is not exact keep their size, as the
                least that they take; None to let them grow.
        """
        # Most blocks share their rule with others, so each rule is evaluated once.
        size_of = {rule: rule.at(m if since is None or rule.is_exact else since) for rule in set(self.rules)}
        sizes = [size_of[rule] for rule in self.rules]
        events = ((block, FREE if size == FREE else sizes[block]) for block, size in self.trace.events)
        return replace(self.trace, events=tuple(events))


def structure_of(trace: Trace) -> tuple[object, ...]:
    """Return what two traces have in common if only their sizes differ."""
    return tuple((block, size == FREE) for block, size in trace.events), trace.marks, trace.streams


def block_sizes(trace: Trace) -> list[int]:
    """Return the size of each block of a trace, by its number."""
    return [size for _, size in trace.events if size != FREE]


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


SCANNED_EVENTS = 200_000
"""Allocations and frees that are replayed below the bound, size after size, which takes half a second."""
STRIDE = 32
"""Further sizes are tried in steps of one part in this many."""


class Fitting:
    """The micro-batches at which all orders of a step fit in a budget: by live bytes, then by replay.

    What fits need not be monotone in a caching allocator, so all sizes below the bound of the live bytes are
    replayed until one fits, which is then the largest of all. If none does within `SCANNED_EVENTS`, the rest
    is searched in larger steps.

    Args:
        orders: programs of the step, each with its own order of micro-batches and steps.
        new_allocator: returns an empty allocator with the budget as its limit.
    """

    def __init__(self, orders: Sequence[Program], new_allocator: Callable[[], Allocator]) -> None:
        self.orders = orders
        self._new_allocator = new_allocator
        self._limit = new_allocator().limit
        self._live_peaks = [_live_peak(program) for program in orders]
        self._known: dict[int, bool] = {}

    def fits(self, m: int) -> bool:
        """Return whether a micro-batch fits."""
        if m not in self._known:
            self._known[m] = self._may_fit(m) and all(
                replay(program.at(m), self._new_allocator()).fits for program in self.orders
            )
        return self._known[m]

    def largest(self, cap: int, multiple: int = 1) -> int:
        """Return a micro-batch up to ``cap`` that fits where the next one does not, 0 if none is found."""
        most, high = cap // multiple, 1
        while high <= most and self._may_fit(high * multiple):
            high *= 2
        bound = largest(lambda n: self._may_fit(n * multiple), high // 2, min(high, most + 1))
        events = sum(len(program.trace.events) for program in self.orders)
        single = max(0, bound - SCANNED_EVENTS // max(1, events))
        size, above = bound, bound + 1
        while size and not self.fits(size * multiple):
            above = size
            size -= 1 if size > single else max(1, size // STRIDE)
        return largest(lambda n: self.fits(n * multiple), size, above) * multiple

    def _may_fit(self, m: int) -> bool:
        """Return whether the live bytes fit, without which nothing does."""
        return self._limit is None or all(peak_at(m) <= self._limit for peak_at in self._live_peaks)


def _live_peak(program: Program) -> Callable[[int], int]:
    """Return a function of the micro-batch: the most bytes that are live at the same time."""
    numbers = {rule: number for number, rule in enumerate(dict.fromkeys(program.rules))}
    events = program.trace.events
    places = np.array([numbers[program.rules[block]] for block, _ in events], np.intp)
    signs = np.array([-1 if size == FREE else 1 for _, size in events], np.int64)

    def peak_at(m: int) -> int:
        sizes = np.array([rule.at(m) for rule in numbers], np.int64)
        return int(np.cumsum(sizes[places] * signs).max(initial=0))

    return peak_at


MOST_APART, LEAST_APART = 0.25, 16
"""Share and number of blocks that one of two recordings may have alone. A sum of gradients takes two more
from some size on, which is one block in ten for a model of linear layers."""
MOST_EDITS = 1000
"""Bound on them, as the search for pairs takes its square."""
LIFE_SLACK, LIFE_SHARE = 8, 3
"""Number of allocations, and one part in this many, by which the lives of a pair may differ."""


def align(recordings: Mapping[int, Recording]) -> tuple[Program, frozenset[int]]:
    """Fit a program to recordings by size, the smallest first.

    Returns:
        The program, and its blocks that are taken from the largest recording: not all have them, or they
        follow no rule.

    Raises:
        InputError: they part too far, with the place.
    """
    *smaller, (most, last) = recordings.items()
    pairs = [_pairs(size, recording, most, last) for size, recording in smaller]
    sizes_of = [block_sizes(recording.trace) for recording in recordings.values()]
    rule_of = cache(partial(_rule, [*recordings]))
    rules: list[Polynomial] = []
    unpaired = set()
    for block, size in enumerate(sizes_of[-1]):
        of_pair = (sizes[pair[block]] for sizes, pair in zip(sizes_of, pairs, strict=False) if block in pair)
        column = (*of_pair, size)
        rule = rule_of(column) if len(column) == len(recordings) else None
        if rule is None:
            unpaired.add(block)
        rules.append(rule or Polynomial(size))
    return Program(last.trace, tuple(rules)), frozenset(unpaired)


def _rule(points: Sequence[int], sizes: Sequence[int]) -> Polynomial | None:
    """Return the polynomial through sizes; None if there is none, or if it is negative at a size of 1."""
    rule = polynomial_through(points, sizes)
    return rule if rule is not None and sum(rule[:3]) >= 0 else None


def _pairs(n: int, small: Recording, m: int, large: Recording) -> dict[int, int]:
    """Return the block of the smaller recording, at size n, for each block of the larger one that both have.

    Blocks of one stack and one pool are paired in order, if they stay, or grow by no more than the square of
    the size.

    Raises:
        InputError: the recordings part too far, with the place.
    """
    sizes, lives, streams = block_sizes(small.trace), _lives(small.trace), small.trace.streams
    other_sizes, other_lives = block_sizes(large.trace), _lives(large.trace)

    def may_be_pair(x: int, y: int) -> bool:
        life, other_life = lives[x], other_lives[y]
        return (
            sizes[x] * n * n <= other_sizes[y] * n * n <= sizes[x] * m * m
            and abs(life - other_life) <= LIFE_SLACK + max(life, other_life) // LIFE_SHARE
            and small.stacks[x] == large.stacks[y]
            and streams[x] == large.trace.streams[y]
        )

    most = min(MOST_EDITS, max(LEAST_APART, int(MOST_APART * len(other_sizes))))
    pairs, reached = shortest_edit(may_be_pair, len(sizes), len(other_sizes), most)
    if pairs is not None:
        return pairs
    where = []
    for size, stacks, block in zip((n, m), (small.stacks, large.stacks), reached, strict=True):
        line = line_of(stacks[block]) if block < len(stacks) else "its end"
        where.append(f"block {block:,} of {len(stacks):,} at {size} ({line or 'without a line'})")
    raise InputError(
        f"the recordings at {n} and {m} part too far: after {where[0]} and {where[1]} more than {most} "
        "blocks are in one of them alone. Record the same steps of the same program, at sizes that are closer"
    )


def shortest_edit(
    is_pair: Callable[[int, int], bool], n: int, m: int, most: int
) -> tuple[dict[int, int] | None, tuple[int, int]]:
    """Pair numbers below n and m, in order, so that fewest are left alone (Myers 1986).

    Args:
        is_pair: returns whether two numbers may be paired.
        n: bound of the first number.
        m: bound of the second one.
        most: numbers that may be left alone.

    Returns:
        The pairs, None if more are left alone; and the numbers that were reached.
    """
    reached: dict[int, tuple[int, Any]] = {1: (0, None)}
    """The first number that was reached for each difference of both, and the runs of pairs up to there."""
    for edits in range(most + 1):
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reached[k - 1][0] < reached[k + 1][0])
            x, runs = reached[k + 1 if down else k - 1]
            start = x = x if down else x + 1
            while x < n and x - k < m and is_pair(x, x - k):
                x += 1
            reached[k] = x, (start, x, k, runs) if x > start else runs
            if x >= n and x - k >= m:
                return dict(_unrolled(reached[k][1])), (n, m)
    x, k = max((min(x, n), k) for k, (x, _) in reached.items() if x - k <= m)
    return None, (x, x - k)


def _unrolled(runs: Any) -> Iterator[tuple[int, int]]:
    """Yield the pairs of runs, the second number first."""
    while runs is not None:
        start, end, k, runs = runs
        yield from ((x - k, x) for x in range(start, end))


def _lives(trace: Trace) -> list[int]:
    """Return how many allocations follow each block until it is freed, or until the end."""
    made, ends = 0, dict[int, int]()
    for block, size in trace.events:
        if size == FREE:
            ends[block] = made
        else:
            made += 1
    return [ends.get(block, made) - block - 1 for block in range(made)]
