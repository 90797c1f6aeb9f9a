"""Shares of a batch: exact, within the limits, in the fewest micro-batches, and as even as that allows."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.distributed.shares import Place, RankSplit, kinds_of, least_of_each_kind, shares
from autobatch.planning import micro_batches, split_evenly
from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import CountSplit

LIMITS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(st.integers(1, 500), LIMITS)
def test_shares_sum_to_the_batch_within_the_limits(samples: int, limits: list[int]) -> None:
    found = shares(samples, limits)
    count = math.ceil(samples / sum(limits))
    assert sum(found) == samples
    assert all(0 <= share <= count * limit for share, limit in zip(found, limits, strict=True))


@given(st.integers(1, 14), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_no_other_shares_are_more_even(samples: int, limits: list[int]) -> None:
    count = math.ceil(samples / sum(limits))
    caps = [range(count * limit + 1) for limit in limits]
    others = [one for one in itertools.product(*caps) if sum(one) == samples]
    assert sorted(shares(samples, limits)) == max(sorted(one) for one in others)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 40))
def test_equal_ranks_share_as_planned(samples: int, world: int, limit: int) -> None:
    assert shares(samples, [limit] * world) == split_evenly(samples, world)


@given(st.integers(0, 300), LIMITS)
def test_the_slices_of_all_ranks_are_the_batch(samples: int, limits: list[int]) -> None:
    batch = GlobalBatch(7, 1, [1000 + place for place in range(samples)])
    found = []
    for rank, limit in enumerate(limits):
        parts = RankSplit(CountSplit(), rank, limits).parts(batch, limit)
        assert all(1 <= len(part.ids) <= limit and part.batch_index == 7 for part in parts)
        own = sum(len(part.ids) for part in parts)
        assert [len(part.ids) for part in parts] == micro_batches(own, limit)
        found += [(place, one) for part in parts for place, one in zip(part.places, part.ids, strict=True)]
    assert found == list(enumerate(batch.ids))


def test_a_split_asks_the_split_within() -> None:
    split = RankSplit(CountSplit(), 1, [3, 3])
    part = split.parts(GlobalBatch(0, 0, list(range(6))), 3)[0]
    assert list(part.places) == [3, 4, 5]
    assert split.halved(part, 3) == 2
    assert split.of_longest(3) == 3


def test_ranks_of_one_kind_get_the_least_of_it() -> None:
    big, small = Place("A", 40, 1000), Place("B", 8, 100)
    places = [big, small, big._replace(budget_bytes=985), big._replace(budget_bytes=900)]
    kinds = kinds_of(places)
    assert kinds == [0, 1, 0, 3]
    assert least_of_each_kind([10, 2, 9, 8], kinds) == [9, 2, 9, 8]


@pytest.mark.parametrize("limits", [[5, 3], [7, 2, 4, 1], [1, 1], [24]])
@pytest.mark.parametrize("samples", [1, 2, 14, 100])
def test_the_rounds_are_the_most_micro_batches_of_any_rank(limits: list[int], samples: int) -> None:
    splits = [RankSplit(CountSplit(), rank, limits) for rank in range(len(limits))]
    batch = GlobalBatch(0, 0, list(range(samples)))
    counts = [len(split.parts(batch, limit)) for split, limit in zip(splits, limits, strict=True)]
    assert {split.rounds(batch) for split in splits} == {max(counts)}
