"""The plan over ranks, in one process; `tests/scenarios/test_ranks.py` has several."""

from __future__ import annotations

from autobatch.core.records.device import DeviceRecord
from autobatch.distributed.engine import Engine
from autobatch.distributed.rank_plan import (
    limit_of_rank,
    limits_over_ranks,
    open_engine,
    share_of_rank,
    split_of_rank,
    spread,
)
from autobatch.distributed.ranks import Alone
from autobatch.planning import make_plan
from autobatch.workload.split import CountSplit
from tests.support.training import make_loop, make_workload

DEVICE = DeviceRecord(kind="cpu", name="a CPU", total_bytes=9, budget_bytes=5, budget_source="as set")


class Three(Alone):
    """The last of three ranks, of which the second is smaller."""

    rank, world = 2, 3

    def gather(self, value):
        return [["h", "A", 9, 5, 8], ["h", "B", 9, 5, 2], value]


def test_one_process_keeps_its_plan() -> None:
    plan = make_plan(target_batch=7, micro_batch_limit=3, learning_rate=0.1)
    assert limit_of_rank(Alone(), plan) == 3
    assert share_of_rank(Alone(), plan, 7) == 7
    split = CountSplit()
    assert split_of_rank(Alone(), plan, split) is split
    train_state = make_loop(make_workload()).train_state
    assert type(open_engine(Alone(), plan, split, train_state, lambda: (None, 0))) is Engine


def test_every_rank_gets_its_part_of_the_batch() -> None:
    whole = make_plan(target_batch=33, micro_batch_limit=9, learning_rate=0.1)
    plan = spread(whole, limits_over_ranks(Three(), 9, DEVICE))
    # ⌈33 ÷ (8 + 2 + 9)⌉ = 2 micro-batches: the second rank runs 4 samples, the others share 29.
    assert [one.samples for one in plan.ranks] == [14, 4, 15]
    assert [one.micro_batches for one in plan.ranks] == [[7, 7], [2, 2], [8, 7]]
    assert [one.limit for one in plan.ranks] == [8, 2, 9]
    assert [one.kind for one in plan.ranks] == [0, 1, 2]
    assert (plan.world_size, plan.micro_batch, plan.accumulation_steps) == (3, 7, 2)
    assert limit_of_rank(Three(), plan) == 9
    assert share_of_rank(Three(), plan, 33) == 15
