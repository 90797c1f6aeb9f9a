"""Recordings of one program at several sizes, aligned block by block and fitted over the size.

    Recording at 8 ─┐
                    ├─ blocks in pairs ─► one order of events, that of the largest ─► Program
    Recording at 16 ┘

Between sizes few blocks come and go: the scratch of a long sum, a library's workspace in the first run. These
are taken as in the largest recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.units import format_bytes
from autobatch.device.allocator.trace import FREE
from autobatch.device.snapshot_file import Recording, Stack
from autobatch.footprint.program import Polynomial, Program, Untraceable, interpolate

MOST_APART, LEAST_APART = 0.25, 16
"""Share and number of blocks that one of two recordings may have alone. A sum of gradients takes two more
from some size on, which is one block in ten for a model of linear layers."""
MOST_EDITS = 1000
"""Bound on them, as the search for pairs takes its square."""
LIFE_SLACK, LIFE_SHARE = 8, 3
"""Number of allocations, and one part in this many, by which the lives of a pair may differ."""
Sized = tuple[int, Recording]
"""A recording with its size in samples."""


class Aligned(NamedTuple):
    """A program that was fitted to recordings."""

    program: Program
    unpaired: frozenset[int]
    """Blocks that are taken from the largest recording: not all have them, or they follow no rule."""


def align(recordings: Sequence[Sized]) -> Aligned:
    """Fit a program to recordings, the smallest first.

    Raises:
        InputError: they part too far, with the place.
    """
    *smaller, (largest, last) = recordings
    pairs = [_pairs(sized, (largest, last)) for sized in smaller]
    sizes_of = [_sizes(recording) for _, recording in recordings]
    points = [size for size, _ in recordings]
    rules: list[Polynomial] = []
    unpaired = set()
    known: dict[tuple[int, ...], Polynomial | None] = {}
    for block, size in enumerate(sizes_of[-1]):
        others = [pair.get(block) for pair in pairs]
        column = (*(sizes[at] for sizes, at in zip(sizes_of, others, strict=False) if at is not None), size)
        if len(column) < len(points):
            rule = None
        else:
            if column not in known:
                known[column] = _rule(points, column)
            rule = known[column]
        unpaired |= {block} if rule is None else set()
        rules.append(Polynomial(size) if rule is None else rule)
    events = ((block, None if size == FREE else rules[block]) for block, size in last.trace.events)
    return Aligned(Program(tuple(events), ()), frozenset(unpaired))


def _rule(points: Sequence[int], sizes: Sequence[int]) -> Polynomial | None:
    """Return the rule through sizes: by the square if that explains two of them; None if there is none."""
    try:
        rule = interpolate(points, sizes)
    except Untraceable:
        return None
    (m, n), (size, larger) = points[:2], sizes[:2]
    if len(points) == 2 and rule.constant < 0 and size * n * n == larger * m * m and size % (m * m) == 0:
        return Polynomial(0, 0, size // (m * m))
    return rule if sum(rule[:3]) >= 0 else None  # else negative at a size of 1


def _pairs(small: Sized, large: Sized) -> dict[int, int]:
    """Return the block of the smaller recording for each block of the larger one that both have.

    First blocks are paired that stay, or grow with the size or its square, as nearly all do. Between them,
    others are paired in order if their growth lies in between.

    Raises:
        InputError: the recordings part too far.
    """
    (n, first), (m, second) = small, large
    sizes, lives = _sizes(first), _lives(first)
    other_sizes, other_lives = _sizes(second), _lives(second)
    kinds = list(zip(first.stacks, first.pools, strict=True))
    other_kinds = list(zip(second.stacks, second.pools, strict=True))

    def may_be_pair(x: int, y: int) -> bool:
        life, other_life = lives[x], other_lives[y]
        return (
            sizes[x] * n * n <= other_sizes[y] * n * n <= sizes[x] * m * m
            and abs(life - other_life) <= LIFE_SLACK + max(life, other_life) // LIFE_SHARE
            and kinds[x] == other_kinds[y]
        )

    def is_pair(x: int, y: int) -> bool:
        size, other = sizes[x], other_sizes[y]
        grows = other == size or other * n == size * m or other * n * n == size * m * m
        return grows and may_be_pair(x, y)

    most = min(MOST_EDITS, max(LEAST_APART, int(MOST_APART * len(other_sizes))))
    pairs, _ = shortest_edit(is_pair, range(len(sizes)), range(len(other_sizes)), most)
    if pairs is None:
        pairs, (x, y) = shortest_edit(may_be_pair, range(len(sizes)), range(len(other_sizes)), most)
    if pairs is None:
        raise InputError(
            f"the recordings at {n} and {m} part too far: after block {x:,} of {len(sizes):,} at {n}"
            f"{_about(first, sizes, x)} and block {y:,} of {len(other_sizes):,} at {m}"
            f"{_about(second, other_sizes, y)} more than {most} blocks are in one of them alone. Record the "
            "same steps of the same program, at sizes that are closer"
        )
    between = []
    ends = [(-1, -1), *pairs, (len(sizes), len(other_sizes))]
    for (x, y), (next_x, next_y) in pairwise(ends):
        xs, ys = range(x + 1, next_x), range(y + 1, next_y)
        if xs and ys:
            between += shortest_edit(may_be_pair, xs, ys, len(xs) + len(ys))[0] or []
    return {y: x for x, y in [*pairs, *between]}


def _about(recording: Recording, sizes: Sequence[int], block: int) -> str:
    """Return the size and the line of a block."""
    if block >= len(sizes):
        return " (its end)"
    line = line_of(recording.stacks[block])
    return f" ({format_bytes(sizes[block])}{line and ' in '}{line})"


def shortest_edit(
    is_pair: Callable[[int, int], bool], xs: range, ys: range, most: int
) -> tuple[list[tuple[int, int]] | None, tuple[int, int]]:
    """Pair numbers of two ranges, in order, so that fewest are left alone (Myers 1986).

    Args:
        is_pair: returns whether two numbers may be paired.
        xs: the first range.
        ys: the second one.
        most: numbers that may be left alone.

    Returns:
        The pairs, None if more are left alone; and the numbers that were reached.
    """
    n, m = len(xs), len(ys)
    reached = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(most + 1):
        history.append(dict(reached))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reached[k - 1] < reached[k + 1])
            x = reached[k + 1] if down else reached[k - 1] + 1
            while x < n and x - k < m and is_pair(xs[x], ys[x - k]):
                x += 1
            reached[k] = x
            if x >= n and x - k >= m:
                back = [*_walk_back(history, n, m)]
                return [(xs[x], ys[y]) for x, y in reversed(back)], (xs.stop, ys.stop)
    x, k = max((min(x, n), k) for k, x in reached.items() if x - k <= m)
    return None, (xs.start + x, ys.start + x - k)


def _walk_back(history: Sequence[dict[int, int]], n: int, m: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs, the last first."""
    x, y = n, m
    for edits in range(len(history) - 1, -1, -1):
        reached, k = history[edits], x - y
        down = k == -edits or (k != edits and reached[k - 1] < reached[k + 1])
        before = k + 1 if down else k - 1
        start = reached[before] + (not down) if edits else 0
        while x > start:
            x, y = x - 1, y - 1
            yield x, y
        x, y = (x, y - 1) if down else (x - 1, y)


def _sizes(recording: Recording) -> list[int]:
    return [size for _, size in recording.trace.events if size != FREE]


def _lives(recording: Recording) -> list[int]:
    """Return how many allocations follow each block until it is freed, or until the end."""
    born = [0] * len(recording.pools)
    lives = [0] * len(recording.pools)
    count = 0
    for block, size in recording.trace.events:
        if size == FREE:
            lives[block] = count - born[block]
            born[block] = -1
        else:
            count += 1
            born[block] = count
    return [count - start if start >= 0 else life for start, life in zip(born, lives, strict=True)]


LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "/torch/", "<frozen", "<string>", "?")
"""Parts of the names of files that are not the user's own."""


def line_of(stack: Stack) -> str:
    """Return the user's own line that allocated a block, else that of a library; empty without frames."""
    python = [frame for frame in stack if frame.file.endswith(".py") or frame.file.startswith("<")]
    own = [frame for frame in python if not any(part in frame.file for part in LIBRARIES)]
    for frame in [*own, *python]:
        return f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line} {frame.function}"
    return ""
