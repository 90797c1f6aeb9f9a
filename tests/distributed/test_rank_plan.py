"""The arithmetic of a plan over ranks; `tests/scenarios/test_ranks.py` trains with such plans."""

from __future__ import annotations

from typing import Any

import pytest

from autobatch.core.records import DeviceRecord, SizeCut
from autobatch.distributed.rank_plan import agree_on_cut, limits_over_ranks, spread
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan


class Told(Ranks):
    """Ranks that give these values."""

    def __init__(self, *values: Any) -> None:
        self.values, self.world = values, len(values)

    def gather(self, value: Any) -> list[Any]:
        return [*self.values]


def device(name: str, budget_bytes: int) -> DeviceRecord:
    return DeviceRecord(
        kind="cpu", name=name, total_bytes=2000, budget_bytes=budget_bytes, budget_source="as set"
    )


def test_every_rank_gets_its_part_of_the_batch() -> None:
    whole = make_plan(target_batch=33, micro_batch_limit=9, learning_rate=0.1)
    three = Told(*(("h", device(name, 5), limit) for name, limit in (("A", 8), ("B", 2), ("C", 9))))
    plan = spread(whole, limits_over_ranks(three, 9, device("C", 5)))
    # ⌈33 ÷ (8 + 2 + 9)⌉ = 2 micro-batches: the second rank runs 4 samples, the others share 29.
    assert [one.samples for one in plan.ranks] == [14, 4, 15]
    assert [one.micro_batches for one in plan.ranks] == [[7, 7], [2, 2], [8, 7]]
    assert (plan.world_size, plan.micro_batch, plan.accumulation_steps) == (3, 7, 2)


def test_ranks_of_one_kind_get_the_least_of_it() -> None:
    """The budget of the third is close to that of the first, and that of the last is not."""
    budgets = (("A", 1000, 10), ("B", 100, 2), ("A", 985, 9), ("A", 900, 8))
    four = Told(*(("h", device(name, budget), limit) for name, budget, limit in budgets))
    found = limits_over_ranks(four, 10, device("A", 1000))
    assert [(one.kind, one.limit) for one in found] == [(0, 9), (1, 2), (0, 9), (3, 8)]


def cut_of(limit: int, most: int, digest: str = "same") -> SizeCut:
    return SizeCut(longest=64.0, micro_batch=limit, max_micro_batch=most, digest=digest)


def test_ranks_agree_on_the_least_limit() -> None:
    assert agree_on_cut(Told(cut_of(2, 16), cut_of(3, 12)), cut_of(2, 16)) == cut_of(2, 12)


@pytest.mark.parametrize("other", [None, cut_of(2, 16, digest="other")])
def test_all_ranks_split_by_count_if_one_does_or_has_other_samples(other: SizeCut | None) -> None:
    assert agree_on_cut(Told(cut_of(2, 16), other), cut_of(2, 16)) is None
