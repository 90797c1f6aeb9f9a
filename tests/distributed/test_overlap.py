"""The engine on DDP: how often ranks communicate. `test_after.py` holds both engines to whole batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import make_workload

pytestmark = pytest.mark.distributed
STEPS = 4


def count_collectives(sync: str) -> dict[str, int]:
    """Train, and count what the ranks send in the last step."""
    group = open_group()
    loop = ranked_loop(group, make_workload(), [3, 3], target_batch=24, steps=STEPS, sync=sync)
    counts: Counter[str] = Counter()
    all_reduce = dist.all_reduce

    def counted(tensor: Any, *args: Any, **more: Any) -> Any:
        is_in_flight = more.get("async_op") and tensor.dtype.is_floating_point
        kind = "gradients" if is_in_flight else "reduction"
        counts[kind if tensor.dtype.is_floating_point else "vote"] += 1
        return all_reduce(tensor, *args, **more)

    records = loop.run()
    for _ in range(STEPS - 1):
        next(records)
    dist.all_reduce = counted
    next(records)
    dist.all_reduce = all_reduce
    group.close()
    return dict(counts)


def test_after_needs_one_collective_a_step(server: RankServer) -> None:
    assert server.values(count_collectives, "after") == [{"reduction": 1}] * 2


def test_overlap_reduces_gradients_once_a_step(server: RankServer) -> None:
    assert server.values(count_collectives, "overlap") == [{"gradients": 1, "reduction": 1, "vote": 1}] * 2
