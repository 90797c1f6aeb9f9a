"""Runs over ranks that users have reported: one answer on all ranks, and no end of what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import AutobatchError, InputError
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.runs import fit
from tests.support.training import (
    Rows,
    make_workload,
    mean_loss,
    network,
    points,
)

pytestmark = pytest.mark.distributed
LARGE = 2**19
"""Elements of a buffer that no run copies at every step."""


class Queued(nn.Module):
    """Model with a large buffer, of which a run keeps no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("queue", torch.zeros(LARGE))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def end_of_skipped_step() -> str:
    """Let the third step have no finite loss, and rank 1 alone write a large buffer; return how it ended."""
    group = open_group(6)

    def loss(model: Any, batch: Any) -> Tensor:
        found = mean_loss(model, batch)
        if loop.batches_seen != 2 or group.rank == 0:
            return found
        model.queue.add_(1)
        return found * float("nan")

    options = {"target_batch": 8, "steps": 6, "on_nonfinite": "skip"}
    loop = ranked_loop(group, make_workload(model=Queued, loss=loss), [4, 4], **options)
    try:
        list(loop.run())
    except AutobatchError as error:
        return type(error).__name__
    return "ended"


def test_all_ranks_end_a_step_that_cannot_be_skipped_alike(server: RankServer) -> None:
    assert server.values(end_of_skipped_step) == ["NonFiniteError"] * 2


class Routed(nn.Module):
    """Model of two experts, each of which has the samples on its side of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 3).double() for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs.new_zeros(len(inputs), 3)
        for expert, mine in zip(self.experts, (inputs[:, 0] > 0, inputs[:, 0] <= 0), strict=True):
            if mine.any():
                outputs = outputs.index_put((mine,), expert(inputs[mine]))
        return outputs


def halves() -> Rows:
    """Make batches of 8 samples, the first half of which one expert has, and the other the second."""
    inputs, labels = points(16).columns
    inputs[:, 0] = inputs[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat_interleave(4).repeat(2)
    return Rows(inputs, labels)


def train_experts(out: str) -> str:
    """Train on batches of which each rank has the samples of one expert; return how it ended."""
    workload = make_workload(model=Routed, train_data=halves(), sampler=list(range(16)))
    options = {"target_batch": 8, "max_micro_batch": 4, "steps": 2, "parallel": "shard"}
    try:
        fit(workload, Path(out), **options)
    except InputError as error:
        return str(error)
    return "ended"


def test_ranks_that_share_a_model_may_not_each_use_another_part_of_it(
    server: RankServer, tmp_path: Path
) -> None:
    """FSDP2 would add the gradient of one expert to that of the other."""
    for said in server.values(train_experts, str(tmp_path)):
        assert "gradients to other parameters on each rank" in said
