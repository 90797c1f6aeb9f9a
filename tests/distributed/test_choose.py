"""The choice between DDP and a reduction after the last backward pass."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.distributed import choose
from autobatch.distributed.shares import RankSplit
from autobatch.workload.data import load_micro_batch
from autobatch.workload.split import CountSplit
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.training import make_loop, make_workload, network

pytestmark = pytest.mark.distributed


class Unused(nn.Module):
    """A model with a part that rank 1 does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rest = network(), nn.Linear(3, 3).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.body(inputs)
        return found if os.environ["RANK"] == "1" else self.rest(found)


class Looked(nn.Module):
    """A model with a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table(inputs.abs().long() % 9).mean(1)


def choose_for(kind: str, asked: Any, most_bytes: int, senders: tuple[str, ...]) -> str:
    choose.EXCHANGE_BYTES, choose.SENDERS = most_bytes, senders
    group = open_group()
    models = {
        "plain": network,
        "graphs": network,
        "unused": Unused,
        "sparse": Looked,
        "16 bits": lambda: network(torch.bfloat16),
    }
    workload = make_workload(model=models[kind])
    if kind == "16 bits":
        workload = make_workload(
            model=models[kind], loss=lambda model, batch: model(batch[0].bfloat16()).float().sum()
        )
    loop = make_loop(workload, world=group.world)
    loop.train_state.gradients.are_overwritten = kind == "graphs"
    before = torch.get_rng_state()
    try:
        choice = choose.choose_engine(
            group,
            RankSplit(CountSplit(), group.rank, [2, 2]),
            [0, 0],
            loop.train_state,
            spare=lambda: (load_micro_batch(workload, [0, 1]), 2),
            asked=asked,
        )
        assert torch.equal(torch.get_rng_state(), before)
        found = f"{choice.engine.name}: {choice.reason}"
    except InputError as error:
        found = str(error)
    group.close()
    return found


@pytest.mark.parametrize(
    ("kind", "asked", "most_bytes", "expected"),
    [
        ("plain", "auto", 10**6, "after: the gradients of 600 B fit in one reduction"),
        ("plain", "auto", 0, "overlap: the last backward pass hides the reduction"),
        ("plain", "after", 0, "after: as asked"),
        ("plain", "overlap", 10**6, "overlap: as asked"),
        ("16 bits", "auto", 0, "after: 16-bit gradients are summed in float32"),
        ("graphs", "auto", 0, "after: the gradients of CUDA graphs are copied"),
        ("unused", "auto", 0, "after: parameter rest.weight got no gradient from a micro-batch"),
        ("sparse", "auto", 0, "after: the gradient of table.weight is sparse, and DDP's buckets are dense"),
        (
            "unused",
            "overlap",
            0,
            "--grad-sync overlap is not possible: parameter rest.weight got",
        ),
    ],
)
def test_all_ranks_choose_alike(
    server: RankServer, kind: str, asked: str, most_bytes: int, expected: str
) -> None:
    found = server.values(choose_for, kind, asked, most_bytes, ())
    assert found[0] == found[1]
    assert found[0].startswith(expected), found[0]


@pytest.mark.program
def test_on_the_cpu_nothing_is_hidden(server: RankServer) -> None:
    found = server.values(choose_for, "plain", "auto", 0, choose.SENDERS)
    assert found == ["after: the cores that would hide the reduction carry it out"] * 2
