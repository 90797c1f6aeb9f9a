"""Mistakes in the sums over ranks, which the comparison with whole batches finds; and one rank alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from autobatch.distributed import reduce
from autobatch.distributed.group import join_launch
from autobatch.distributed.ranks import Launch
from autobatch.distributed.reduce import sum_totals
from autobatch.step.gradients import exchange_buffer
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import mean_over_tokens
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import TOKENS, apart, make_loop, make_workload, reference, weights

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

    def mean(layout: Any, own: Any, *, to_buffer: bool) -> None:
        copy_between(layout, own, to_buffer=to_buffer)
        for view in layout.views if to_buffer else ():
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


def train_alone() -> tuple[Tensor, list[float | None], Tensor, list[float | None]]:
    """Train in one process, with an engine of several ranks and without one."""
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    group = join_launch(Launch(rank=0, world=1, address="127.0.0.1", port=port, has_agent_store=True))
    workload = make_workload(**TOKENS)
    loop = ranked_loop(group, workload, [4], target_batch=10, steps=4, max_grad_norm=0.3)
    state = loop.train_state
    state.exchange = exchange_buffer(state.parameters, state.device, world=1)
    losses = [record.loss for record in loop.run()]
    group.close()
    plain = make_loop(workload, micro_batch=4, target_batch=10, steps=4, max_grad_norm=0.3)
    expected = [record.loss for record in plain.run()]
    return weights(loop.train_state.model), losses, weights(plain.train_state.model), expected


def test_an_engine_of_one_rank_changes_no_bit(server: RankServer) -> None:
    ((found, losses, plain, expected),) = server.values(train_alone, world=1)
    assert torch.equal(found, plain)
    assert losses == expected
