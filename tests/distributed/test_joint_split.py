"""The joint split by size: what each rank takes, its limits, and how evenly the work is shared."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.core.records.plan import MicroBatchCost, SizeCut
from autobatch.distributed.joint_split import JointSizeSplit, agree_on_cut
from autobatch.distributed.ranks import Alone
from autobatch.distributed.shares import RankSplit
from autobatch.search.sizes.plan_split import seconds_of
from autobatch.workload.order import GlobalBatch
from autobatch.workload.size_split import SizeSplit, size_of_part
from autobatch.workload.split import CountSplit

COST = MicroBatchCost(fixed=1.0, per_sample=0.1, per_size=0.05, per_size_squared=0.001)


def split_of(
    sizes: list[int], tokens: int, cost: MicroBatchCost | None = COST, *, is_padded: bool = True
) -> SizeSplit:
    """Make a split in which so many tokens fit, padding included if there is any."""
    knots = sorted(set(sizes))
    cut = SizeCut(
        sizes=[float(one) for one in knots],
        micro_batches=[max(1, tokens // one) for one in knots],
        limits_by="replay",
        cost=cost,
        is_padded=is_padded,
    )
    return SizeSplit(sizes=np.array(sizes, dtype=float), cut=cut, measured_every=4)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    shrunk=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4),
    cost=st.sampled_from([COST, None]),
    index=st.integers(0, 4),
    is_padded=st.booleans(),
)
def test_ranks_take_each_sample_once_within_their_limits(
    sizes: list[int], shrunk: list[float], cost: MicroBatchCost | None, index: int, is_padded: bool
) -> None:
    split = split_of(sizes, 120, cost, is_padded=is_padded)
    limits = [max(1, int(split.largest * share)) for share in shrunk]
    batch = GlobalBatch(index, 0, list(range(len(sizes)))[::-1])
    seen: list[int] = []
    counts = []
    rounds = {JointSizeSplit(split, rank, limits).rounds(batch) for rank in range(len(limits))}
    for rank in range(len(limits)):
        parts = JointSizeSplit(split, rank, limits).parts(batch, limits[rank])
        counts.append(len(parts))
        for part in parts:
            assert [batch.ids[place] for place in part.places] == part.ids
            size = size_of_part(split.sizes[part.ids], is_padded=is_padded)
            assert len(part.ids) <= split.limits(np.array([size]), limits[rank])[0]
            seen += part.ids
    assert sorted(seen) == sorted(batch.ids)
    # Every rank knows how many micro-batches the others run, and runs empty ones for those that it lacks.
    assert len(rounds) == 1
    assert max(counts) <= rounds.pop() <= max(counts) + len(limits)
    if is_padded and len(sizes) >= 8 * len(limits) * max(limits):
        assert len(set(counts)) == 1


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_work_is_shared_evenly_and_no_rank_waits_long(world: int) -> None:
    draw = np.random.default_rng(0)
    sizes = np.clip(draw.lognormal(4.5, 0.8, 512), 8, 512).astype(int).tolist()
    cost = MicroBatchCost(fixed=1e-3, per_size=1e-3)
    split = split_of(sizes, 4096, cost)
    batch = GlobalBatch(1, 0, list(range(512)))

    def seconds(of: Any) -> list[float]:
        return [
            sum(
                seconds_of(cost, len(part.ids), float(split.sizes[part.ids].max()))
                for part in of(rank).parts(batch, limit)
            )
            for rank in range(world)
        ]

    limit = split.largest
    joint = seconds(lambda rank: JointSizeSplit(split, rank, [limit] * world))
    limit = 8
    by_count = seconds(lambda rank: RankSplit(CountSplit(), rank, [limit] * world))
    assert max(joint) / np.mean(joint) < 1.01
    assert max(joint) < 0.7 * max(by_count)


def test_one_rank_cuts_as_one_process_does() -> None:
    sizes = [7, 50, 3, 3, 18, 44, 9, 21]
    split = split_of(sizes, 100)
    batch = GlobalBatch(0, 0, list(range(8)))
    joint = JointSizeSplit(split, 0, [split.largest])
    found = joint.parts(batch, split.largest)
    assert [part.ids for part in found] == [part.ids for part in split.parts(batch, split.largest)]
    assert joint.parts(batch, split.largest) is found


class Two(Alone):
    """Ranks of which the other has another cut."""

    world = 2

    def __init__(self, other: SizeCut | None) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, None if self.other is None else msgspec.to_builtins(self.other)]


def cut_at(sizes: list[float], limits: list[int], digest: str = "same") -> SizeCut:
    return SizeCut(sizes=sizes, micro_batches=limits, limits_by="replay", digest=digest)


def test_ranks_agree_on_the_least_limit_for_every_size() -> None:
    own, other = cut_at([8.0, 64.0], [16, 2]), cut_at([8.0, 32.0, 64.0], [12, 5, 3])
    found = agree_on_cut(Two(other), own)
    assert found is not None
    assert (found.sizes, found.micro_batches) == ([8.0, 32.0, 64.0], [12, 2, 2])
    assert agree_on_cut(Alone(), own) is own


@pytest.mark.parametrize("other", [None, cut_at([64.0], [2], digest="other")])
def test_all_ranks_split_by_count_if_one_does_or_has_other_samples(other: SizeCut | None) -> None:
    assert agree_on_cut(Two(other), cut_at([64.0], [2])) is None
    assert agree_on_cut(Two(cut_at([64.0], [2])), None) is None
