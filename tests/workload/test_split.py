"""Splits of a batch over ranks, by count and by size, against brute force; one process is one rank."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.core.records import SizeCut
from autobatch.planning import cut_by_area
from autobatch.workload.order import GlobalBatch, MicroBatchIds, SizeSplit, Split
from tests.support.ragged import padded_and_real


@given(st.integers(0, 300), st.integers(1, 6), st.integers(1, 40), st.sampled_from([1, 4]))
def test_the_slices_of_all_ranks_are_the_batch(samples: int, world: int, limit: int, multiple: int) -> None:
    limit = multiple * -(-limit // multiple)
    batch = GlobalBatch(7, [1000 + place for place in range(samples)])
    of_ranks = [Split(rank, world, multiple).parts(batch, limit) for rank in range(world)]
    parts = [part for of_rank in of_ranks for part in of_rank]
    assert [pair for part in parts for pair in zip(part.places, part.ids, strict=True)] == [
        *enumerate(batch.ids)
    ]
    assert all(1 <= len(part.ids) <= limit for part in parts)
    shares = [sum(len(part.ids) for part in of_rank) for of_rank in of_ranks]
    assert max(shares) - min(shares) < 2 * multiple
    rounds = {Split(rank, world, multiple).rounds(batch, limit) for rank in range(world)}
    assert rounds == {max(map(len, of_ranks))}
    assert all(Split().halved(part, 9) == -(-len(part.ids) // 2) for part in parts)


def partitions(items: list[float]):
    """Yield every set partition."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for number, group in enumerate(smaller):
            yield [*smaller[:number], [first, *group], *smaller[number + 1 :]]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_cut_costs_as_little_as_the_best_of_all_set_partitions(seed: int, ranks: int) -> None:
    """Each group costs what the rank with most of its samples takes."""
    draw = random.Random(seed)
    sizes = sorted((draw.randint(1, 60) for _ in range(7)), reverse=True)
    room, fixed = draw.choice([80, 150, 400]), draw.choice([0.0, 20.0, 180.0])

    def limit(size: float) -> int:
        return ranks * max(1, room // int(size))

    def cost(groups: list[list[float]]) -> float:
        return sum(fixed + math.ceil(len(group) / ranks) * max(group) for group in groups)

    limits = np.array([limit(size) for size in sizes])
    counts = cut_by_area(np.array(sizes, dtype=float), limits, fixed=fixed, ranks=ranks)
    assert sum(counts) == len(sizes)
    groups = [sizes[a:b] for a, b in itertools.pairwise([0, *itertools.accumulate(counts)])]
    best = min(
        cost(groups)
        for groups in partitions(sizes)
        if all(len(group) <= limit(max(group)) for group in groups)
    )
    assert cost(groups) == pytest.approx(best, rel=1e-12)


def split_of(sizes: Any, tokens: float, **more: Any) -> SizeSplit:
    """Make a split in which so many tokens fit, with the padding."""
    longest = float(max(sizes))
    limit = max(1, int(tokens // longest))
    cut = SizeCut(longest=longest, micro_batch=limit, max_micro_batch=max(limit, len(sizes)))
    return SizeSplit(sizes=np.array(sizes, dtype=float), cut=cut, **more)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=60).filter(any),
    shrunk=st.floats(0.1, 1.0),
    world=st.integers(1, 4),
)
def test_ranks_take_each_sample_once_within_their_limit(sizes: list[int], shrunk: float, world: int) -> None:
    largest = split_of(sizes, 120).largest
    limit = max(1, int(largest * shrunk))
    batch = GlobalBatch(3, list(range(len(sizes)))[::-1])
    seen: list[int] = []
    counts, rounds = [], set()
    for rank in range(world):
        split = split_of(sizes, 120, rank=rank, world=world)
        parts = split.parts(batch, limit)
        rounds.add(split.rounds(batch, limit))
        counts.append(len(parts))
        for part in parts:
            assert [batch.ids[place] for place in part.places] == part.ids
            area = len(part.ids) * split.sizes[part.ids].max()
            room = split.cut.micro_batch * split.cut.longest * limit / largest
            assert len(part.ids) == 1 or area <= room * (1 + 1e-9)
            seen += part.ids
    assert sorted(seen) == sorted(batch.ids)
    # Every rank knows how many micro-batches the others run.
    assert rounds == {max(counts)}
    if len(sizes) >= 8 * world * limit:
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", ["uniform", "log-normal", "two-peaked"])
def test_little_of_a_batch_is_padding_and_ranks_share_its_area_to_one_percent(name: str) -> None:
    for world, seed in itertools.product((1, 2, 8), range(4)):
        draw, count = np.random.default_rng(seed), 256 * min(2, world)
        lengths = {
            "uniform": draw.uniform(1, 513, count),
            "log-normal": 512 * np.exp(draw.normal(-1.8, 0.8, count)),
            "two-peaked": np.where(
                draw.random(count) < 0.6, draw.normal(102, 25, count), draw.normal(410, 25, count)
            ),
        }
        sizes = lengths[name].astype(int).clip(2, 512).astype(float)
        batch = GlobalBatch(1, list(range(len(sizes))))
        limit = split_of(sizes, 8 * 512).largest
        areas, groups = [], []
        for rank in range(world):
            split = split_of(sizes, 8 * 512, rank=rank, world=world)
            parts = split.parts(batch, limit)
            fixed = len(parts) * split.fixed_area(limit)
            areas.append(fixed + sum(len(part.ids) * sizes[part.ids].max() for part in parts))
            groups += [list(part.places) for part in parts]
        padded, real = padded_and_real(sizes, groups)
        assert padded / real <= (1.1 if world < 8 else 1.15)
        assert max(areas) * world / sum(areas) - 1 <= 0.01


def test_equal_sizes_and_one_micro_batch_keep_their_order() -> None:
    parts = split_of([3.0, 40.0, 5.0, 38.0, 4.0, 39.0], 160).parts(GlobalBatch(0, [0, 1, 2, 3, 4, 5]), 53)
    assert [part.ids for part in parts] == [part.places for part in parts] == [[1, 5, 3], [2, 4, 0]]
    for tokens in (6, 10):
        equal = split_of([2.0] * 5, tokens).parts(GlobalBatch(1, [4, 0, 3, 1, 2]), tokens // 2)
        assert [i for part in equal for i in part.ids] == [4, 0, 3, 1, 2]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 40))
def test_after_an_error_the_failed_sizes_run_in_micro_batches_of_at_most_half(
    longest: int, more: int, count: int
) -> None:
    cut = SizeCut(longest=9.0, micro_batch=longest, max_micro_batch=longest + more)
    split = SizeSplit(sizes=np.array([1.0, 9.0]), cut=cut)
    for index, limit in enumerate([min(9 * longest, longest + more), longest]):
        size = min(count, limit)
        part = MicroBatchIds(0, range(size), [index] * size)
        shrunk = split.halved(part, split.largest)
        assert 1 <= shrunk <= split.largest
        again = split.parts(GlobalBatch(0, [index] * size), shrunk)
        assert max(len(each.ids) for each in again) <= -(-size // 2)
    assert [split.of_longest(m) for m in (split.largest, 1)] == [longest, 1]
