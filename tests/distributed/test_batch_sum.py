"""The sum of a batch over real processes: what cannot be summed is refused on every rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.distributed.batch_sum import BatchSum
from autobatch.distributed.messages import join_loop
from autobatch.step.gradients import exchange_buffer
from autobatch.step.loss_share import StepTotals
from autobatch.workload.contract import Workload
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import apart, make_loop, make_workload, points, weights

pytestmark = pytest.mark.distributed


def sum_unlike(what: str) -> str:
    """Sum a batch whose ranks differ, and return the message of the error."""
    messages, rank = join_loop(), int(os.environ["RANK"])
    state = make_loop(make_workload(model=lambda: nn.Linear(5, 3).double(), train_data=points(8))).train_state
    state.exchange = exchange_buffer(state.parameters, torch.device("cpu"), world=2)
    totals = StepTotals(samples=8, divisor=8.0, sizes=[4])
    if what == "kinds" and rank:
        totals.count = 4.0
    try:
        BatchSum(messages, messages.all_reduce).run(state, totals)
    except InputError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return ""


def test_losses_of_two_kinds_are_refused(server: RankServer) -> None:
    for message in server.values(sum_unlike, "kinds"):
        assert "a Loss on one rank and a tensor on another" in message


class Words(nn.Module):
    """Rows of a sparse table, of which each rank reads others, and a head."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(40, 3, sparse=sparse)
        self.head = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(inputs.abs().mul(7).long() % 40).mean(1))


def words(*, sparse: bool) -> Workload:
    return make_workload(
        model=lambda: Words(sparse=sparse).double(),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr),
        train_data=points(24),
    )


OPTIONS: dict[str, Any] = {"target_batch": 14, "steps": 4, "max_grad_norm": 0.3}


def train_words(limits: list[int]) -> tuple[list[float], list[list[float | None]]]:
    group = open_group()
    loop = ranked_loop(group, words(sparse=True), limits, **OPTIONS)
    figures = [[one.loss, one.grad_norm] for one in loop.run()]
    found = weights(loop.train_state.model).tolist(), figures
    group.close()
    return found


@pytest.mark.parametrize("limits", [[5, 3], pytest.param([12, 1, 1], marks=pytest.mark.slow)])
def test_sparse_gradients_are_summed_over_the_ranks(server: RankServer, limits: list[int]) -> None:
    alone = make_loop(words(sparse=False), micro_batch=14, **OPTIONS)
    expected = [[one.loss, one.grad_norm] for one in alone.run()]
    found = server.values(train_words, limits, world=len(limits))
    for of_weights, figures in found:
        assert apart(torch.tensor(of_weights, dtype=torch.float64), weights(alone.train_state.model)) < 1e-12
        for of_step, other in zip(figures, expected, strict=True):
            assert of_step == pytest.approx(other, rel=1e-12)
    assert len({str(one) for one in found}) == 1
