"""Splits by size: the cut against brute force, the limits, the random first micro-batch, and shrinking."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.core.records.plan import MicroBatchCost, SizeCut
from autobatch.workload.order import GlobalBatch
from autobatch.workload.size_split import SizeSplit, cheapest_cut, digest_of, fewest_joined
from tests.support.ragged import padded_and_real

COST = MicroBatchCost(fixed=1.0, per_sample=0.1, per_size=0.05, per_size_squared=0.001)


def split_of(sizes: list[float], micro_batches: list[int], **changes) -> SizeSplit:
    """Make a split with one knot per different size, and a cost."""
    knots = sorted(set(sizes))
    cut = SizeCut(
        sizes=knots, micro_batches=micro_batches, limits_by="replay", cost=changes.pop("cost", COST)
    )
    return SizeSplit(sizes=np.array(sizes, dtype=float), cut=cut, **changes)


def seconds(size: float, count: int, cost: MicroBatchCost) -> float:
    return cost.fixed + count * (cost.per_sample + cost.per_size * size + cost.per_size_squared * size**2)


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
def test_the_cut_costs_as_little_as_the_best_of_all_set_partitions(seed: int) -> None:
    draw = random.Random(seed)
    sizes = sorted((draw.randint(1, 60) for _ in range(7)), reverse=True)
    room = draw.choice([80, 150, 400])
    cost = MicroBatchCost(fixed=draw.choice([0.0, 1.0, 9.0]), per_size=0.05, per_size_squared=0.002)

    def limit(size: float) -> int:
        return max(1, room // int(size))

    counts = cheapest_cut(np.array(sizes, dtype=float), [limit(size) for size in sizes], cost)
    ends = list(itertools.accumulate(counts))
    found = sum(seconds(sizes[end - count], count, cost) for end, count in zip(ends, counts, strict=True))
    best = min(
        sum(seconds(max(group), len(group), cost) for group in groups)
        for groups in partitions(sizes)
        if all(len(group) <= limit(max(group)) for group in groups)
    )
    assert found == pytest.approx(best, rel=1e-12)
    assert sum(counts) == len(sizes)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 6), st.booleans())
def test_every_sample_is_in_one_micro_batch_within_the_limit_of_its_size(
    sizes: list[int], most: int, is_measured: bool
) -> None:
    knots = sorted(set(sizes))
    limits = [most * len(knots) - number * most + 1 for number in range(len(knots))]
    one = split_of([float(s) for s in sizes], limits, measured_every=4 if is_measured else None)
    batch = GlobalBatch(8, 0, list(range(len(sizes))))
    for micro_batch in (one.largest, max(1, one.largest // 2), 1):
        parts = one.parts(batch, micro_batch)
        assert sorted(i for part in parts for i in part.ids) == batch.ids
        assert all([batch.ids[place] for place in part.places] == part.ids for part in parts)
        for part in parts:
            limit = limits[knots.index(max(sizes[i] for i in part.ids))]
            assert len(part.ids) <= max(1, limit * micro_batch // one.largest)


def test_micro_batches_hold_neighbouring_sizes_and_the_largest_come_first() -> None:
    sizes = [3.0, 40.0, 5.0, 38.0, 4.0, 39.0]
    parts = split_of(sizes, [4] * 6).parts(GlobalBatch(0, 0, [0, 1, 2, 3, 4, 5]), 4)
    assert [part.ids for part in parts] == [[1, 5, 3], [2, 4, 0]]
    assert [part.places for part in parts] == [[1, 5, 3], [2, 4, 0]]


def test_without_a_cost_the_sorted_samples_are_cut_into_equal_counts() -> None:
    sizes = [float(size) for size in range(1, 11)]
    parts = split_of(sizes, [4] * 10, cost=None).parts(GlobalBatch(1, 0, list(range(10))), 4)
    assert [len(part.ids) for part in parts] == [4, 3, 3]
    assert [sizes[i] for i in parts[0].ids] == [10.0, 9.0, 8.0, 7.0]


def test_samples_of_one_size_keep_their_order() -> None:
    parts = split_of([2.0] * 5, [5]).parts(GlobalBatch(0, 0, [4, 0, 3, 1, 2]), 5)
    assert [i for part in parts for i in part.ids] == [4, 0, 3, 1, 2]


def test_a_measured_batch_begins_with_samples_as_they_were_drawn() -> None:
    sizes = [float(1 + (7 * i) % 32) for i in range(32)]
    one = split_of(sizes, [8] * 32, measured_every=4)
    drawn = list(range(32))
    random.Random(3).shuffle(drawn)
    assert one.parts(GlobalBatch(4, 0, drawn), 8)[0].ids == drawn[:2]
    first = one.parts(GlobalBatch(5, 0, drawn), 8)[0]
    assert sizes[first.ids[0]] == 32.0


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 40))
def test_after_an_error_the_failed_sizes_run_in_micro_batches_of_at_most_half(
    longest: int, more: int, count: int
) -> None:
    limits = [longest + more, longest]
    one = split_of([1.0, 9.0], limits)
    for index, limit in enumerate(limits):
        size = min(count, limit)
        part = one.parts(GlobalBatch(0, 0, [index] * size), one.largest)[0]
        part = part._replace(ids=[index] * size)
        shrunk = one.halved(part, one.largest)
        assert 1 <= shrunk <= one.largest
        again = one.parts(GlobalBatch(0, 0, [index] * size), shrunk)
        assert max(len(each.ids) for each in again) <= -(-size // 2)


def test_the_limit_of_the_longest_samples_shrinks_in_proportion() -> None:
    one = split_of([1.0, 9.0], [40, 8])
    assert [one.of_longest(micro_batch) for micro_batch in (40, 20, 1)] == [8, 4, 1]


def test_a_cut_of_a_large_batch_pads_little() -> None:
    draw = np.random.default_rng(0)
    sizes = np.clip(np.exp(draw.normal(4.4, 0.9, 256)), 1, 512).round()
    one = split_of(sizes.tolist(), [8] * len(set(sizes.tolist())))
    groups = [list(part.places) for part in one.parts(GlobalBatch(1, 0, list(range(256))), 8)]
    padded, real = padded_and_real(sizes, groups)
    assert padded / real <= 1.1


def test_a_digest_tells_other_sizes() -> None:
    assert digest_of(np.array([1.0, 2.0])) == digest_of(np.array([1.0, 2.0]))
    assert digest_of(np.array([1.0, 2.0])) != digest_of(np.array([2.0, 1.0]))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(40, 120))
def test_joined_samples_take_the_fewest_contiguous_micro_batches(sizes: list[int], room: int) -> None:
    ordered = np.array(sorted(sizes, reverse=True), dtype=float)
    counts = fewest_joined(ordered, lambda means: np.floor(room / means + 1e-9).astype(np.int64))
    assert sum(counts) == len(sizes)
    ends = list(itertools.accumulate(counts))
    assert all(ordered[end - n : end].sum() <= room for end, n in zip(ends, counts, strict=True))
    fewest = next(
        groups
        for groups in range(1, len(sizes) + 1)
        for cuts in itertools.combinations(range(1, len(sizes)), groups - 1)
        if all(ordered[a:b].sum() <= room for a, b in itertools.pairwise([0, *cuts, len(sizes)]))
    )
    assert len(counts) == fewest


def test_a_joined_micro_batch_is_limited_by_its_mean_size() -> None:
    sizes = [30.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    cut = SizeCut(sizes=[10.0, 20.0, 30.0], micro_batches=[6, 3, 2], limits_by="replay", is_padded=False)
    parts = SizeSplit(sizes=np.array(sizes), cut=cut).parts(GlobalBatch(0, 0, list(range(6))), 6)
    assert [part.ids for part in parts] == [[0, 1, 2], [3, 4, 5]]


def test_a_batch_in_one_micro_batch_keeps_its_order() -> None:
    drawn = [3, 1, 2, 0]
    (only,) = split_of([1.0, 2.0, 3.0, 4.0], [8] * 4).parts(GlobalBatch(1, 0, drawn), 8)
    assert only.ids == drawn
