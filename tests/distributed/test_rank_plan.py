"""The plan over ranks, in one process; `tests/scenarios/test_ranks.py` has several."""

from __future__ import annotations

import pytest

from autobatch.core.records import DeviceRecord, SizeCut
from autobatch.distributed.engine import Engine
from autobatch.distributed.rank_plan import (
    agree_on_cut,
    limit_of_rank,
    limits_over_ranks,
    open_engine,
    share_of_rank,
    split_for,
    spread,
)
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import Split
from tests.support.training import make_loop, make_workload


def device(name: str, total_bytes: int, budget_bytes: int) -> DeviceRecord:
    return DeviceRecord(
        kind="cpu", name=name, total_bytes=total_bytes, budget_bytes=budget_bytes, budget_source="as set"
    )


class Three(Ranks):
    """The last of three ranks, of which the second is smaller."""

    rank, world = 2, 3

    def gather(self, value):
        return [("h", device("A", 9, 5), 8), ("h", device("B", 9, 5), 2), value]


def test_one_process_keeps_its_plan() -> None:
    plan = make_plan(target_batch=7, micro_batch_limit=3, learning_rate=0.1)
    assert limit_of_rank(Ranks(), plan) == 3
    assert share_of_rank(Ranks(), plan, 7) == 7
    split = Split()
    batch = GlobalBatch(0, 0, list(range(7)))
    assert split_for(Ranks(), plan, None, None).parts(batch, 3) == split.parts(batch, 3)
    train_state = make_loop(make_workload()).train_state
    assert type(open_engine(Ranks(), plan, split, train_state, lambda: (None, 0))) is Engine


def test_every_rank_gets_its_part_of_the_batch() -> None:
    whole = make_plan(target_batch=33, micro_batch_limit=9, learning_rate=0.1)
    plan = spread(whole, limits_over_ranks(Three(), 9, device("a CPU", 9, 5)))
    # ⌈33 ÷ (8 + 2 + 9)⌉ = 2 micro-batches: the second rank runs 4 samples, the others share 29.
    assert [one.samples for one in plan.ranks] == [14, 4, 15]
    assert [one.micro_batches for one in plan.ranks] == [[7, 7], [2, 2], [8, 7]]
    assert [one.limit for one in plan.ranks] == [8, 2, 9]
    assert [one.kind for one in plan.ranks] == [0, 1, 2]
    assert (plan.world_size, plan.micro_batch, plan.accumulation_steps) == (3, 7, 2)
    assert limit_of_rank(Three(), plan) == 9
    assert share_of_rank(Three(), plan, 33) == 15


class Four(Ranks):
    """Ranks of which the third has a budget close to that of the first."""

    world = 4

    def gather(self, value):
        budgets = (("A", 1000, 10), ("B", 100, 2), ("A", 985, 9), ("A", 900, 8))
        return [("h", device(name, 2000, budget), limit) for name, budget, limit in budgets]


def test_ranks_of_one_kind_get_the_least_of_it() -> None:
    found = limits_over_ranks(Four(), 10, device("A", 2000, 1000))
    assert [(one.kind, one.limit) for one in found] == [(0, 9), (1, 2), (0, 9), (3, 8)]


class Two(Ranks):
    """Ranks of which the other has another cut."""

    world = 2

    def __init__(self, other: SizeCut | None) -> None:
        self.other = other

    def gather(self, value):
        return [value, self.other]


def cut_at(sizes: list[float], limits: list[int], digest: str = "same") -> SizeCut:
    return SizeCut(sizes=sizes, micro_batches=limits, limits_by="replay", digest=digest)


def test_ranks_agree_on_the_least_limit_for_every_size() -> None:
    own, other = cut_at([8.0, 64.0], [16, 2]), cut_at([8.0, 32.0, 64.0], [12, 5, 3])
    found = agree_on_cut(Two(other), own)
    assert found is not None
    assert (found.sizes, found.micro_batches) == ([8.0, 32.0, 64.0], [12, 2, 2])
    assert agree_on_cut(Ranks(), own) == own


@pytest.mark.parametrize("other", [None, cut_at([64.0], [2], digest="other")])
def test_all_ranks_split_by_count_if_one_does_or_has_other_samples(other: SizeCut | None) -> None:
    assert agree_on_cut(Two(other), cut_at([64.0], [2])) is None
    assert agree_on_cut(Two(cut_at([64.0], [2])), None) is None
