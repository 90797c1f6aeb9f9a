"""Mistakes in the sums over ranks, which the comparison with whole batches finds; and one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from autobatch.distributed import reduce
from autobatch.distributed.reduce import sum_totals
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import mean_over_tokens
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import TOKENS, apart, make_workload, reference, weights

pytestmark = pytest.mark.distributed
LIMITS = [4, 2]


def forget_counts() -> None:
    """Let every rank divide by its own count."""

    def own_count(totals: Any, rows: Any) -> None:
        count = totals.count
        sum_totals(totals, rows)
        totals.count = count

    reduce.sum_totals = own_count


def forget_world() -> None:
    """Take the mean over the ranks, as DDP does without a hook."""
    copy_between = reduce._copy_between

    def mean(places: Any, own: Any, *, to_buffer: bool) -> None:
        copy_between(places, own, to_buffer=to_buffer)
        for view in places.views if to_buffer else ():
            view.div_(len(LIMITS))

    reduce._copy_between = mean


MISTAKES = {
    "none": None,
    "a mean of means": None,
    "a count of its own": forget_counts,
    "a mean over the ranks": forget_world,
}


def train(mistake: str) -> Tensor:
    make = MISTAKES[mistake]
    if make is not None:
        make()
    changes = {"loss": mean_over_tokens} if mistake == "a mean of means" else {}
    group = open_group()
    workload = make_workload(**{**TOKENS, **changes})
    loop = ranked_loop(group, workload, LIMITS, target_batch=10, steps=2)
    list(loop.run())
    group.close()
    return weights(loop.train_state.model)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_comparison(server: RankServer, mistake: str) -> None:
    workload = make_workload(**TOKENS)
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=2)
    expected, _ = reference(workload, [one.ids for one in sampler.batches()], mean_over_tokens)
    found = server.values(train, mistake)
    distance = max(apart(one, expected) for one in found)
    assert distance < 1e-12 if mistake == "none" else distance > 1e-6
