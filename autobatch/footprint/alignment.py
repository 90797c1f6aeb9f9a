"""Recordings of one program at several sizes, aligned block by block and fitted over the size.

    Recording at 8 ─┐
                    ├─ blocks in pairs ─► one order of events, that of the largest ─► Program
    Recording at 16 ┘

Between sizes few blocks come and go: the scratch of a long sum, a library's workspace in the first run. These
are taken as in the largest recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

from autobatch.core.errors import InputError
from autobatch.device.snapshot_file import Recording, line_of
from autobatch.device.trace import FREE, Trace
from autobatch.footprint.program import Polynomial, Program, block_sizes, polynomial_through

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
    reached = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(most + 1):
        history.append(dict(reached))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reached[k - 1] < reached[k + 1])
            x = reached[k + 1] if down else reached[k - 1] + 1
            while x < n and x - k < m and is_pair(x, x - k):
                x += 1
            reached[k] = x
            if x >= n and x - k >= m:
                return {y: x for x, y in _walk_back(history, n, m)}, (n, m)
    x, k = max((min(x, n), k) for k, x in reached.items() if x - k <= m)
    return None, (x, x - k)


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


def _lives(trace: Trace) -> list[int]:
    """Return how many allocations follow each block until it is freed, or until the end."""
    made, ends = 0, dict[int, int]()
    for block, size in trace.events:
        if size == FREE:
            ends[block] = made
        else:
            made += 1
    return [ends.get(block, made) - block - 1 for block in range(made)]
