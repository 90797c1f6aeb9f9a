"""The sum of a batch over real processes: what cannot be summed is refused on every rank."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.distributed.batch_sum import BatchSum
from autobatch.distributed.messages import join_loop
from autobatch.step.gradients import exchange_buffer
from autobatch.step.loss_share import StepTotals
from tests.support.rank_server import RankServer
from tests.support.training import make_loop, make_workload, points

pytestmark = pytest.mark.distributed


def sum_unlike(what: str) -> str:
    """Sum a batch whose ranks differ, and return the message of the error."""
    messages, rank = join_loop(), int(os.environ["RANK"])
    state = make_loop(make_workload(model=lambda: nn.Linear(5, 3).double(), train_data=points(8))).train_state
    state.exchange = exchange_buffer(state.parameters, torch.device("cpu"), world=2)
    totals = StepTotals(samples=8, divisor=8.0, sizes=[4])
    if what == "kinds" and rank:
        totals.count = 4.0
    if what == "sparse":
        state.parameters[0].grad = torch.zeros(3, 5, dtype=torch.float64).to_sparse()
    try:
        BatchSum(messages, messages.all_reduce).run(state, totals)
    except InputError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kinds", "a Loss on one rank and a tensor on another"),
        ("sparse", "use sparse=False in the"),
    ],
)
def test_what_cannot_be_summed_is_refused(server: RankServer, what: str, message: str) -> None:
    assert all(message in found for found in server.values(sum_unlike, what))
