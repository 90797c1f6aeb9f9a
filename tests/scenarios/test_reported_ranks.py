"""Runs over ranks that users have reported: one answer on all ranks, and no end of what would work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import AutobatchError, InputError, StepRecord
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.runs import fit
from tests.support.training import (
    Rows,
    apart,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    weights,
)

pytestmark = pytest.mark.distributed
LARGE = 2**19
"""Elements of a buffer that no run copies at every step."""


class Started(Listener):
    """Listener that knows how many steps of the training are done."""

    steps = 0

    def stepped(self, step: StepRecord, of: int) -> None:
        self.steps = step.step


class Queued(nn.Module):
    """Model with a large buffer, of which a run keeps no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("queue", torch.zeros(LARGE))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def end_of_skipped_step(out: str) -> str:
    """Let the third step have no finite loss, and rank 1 alone write a large buffer; return its error."""
    listener = Started()

    def loss(model: Any, batch: Any) -> Tensor:
        found = mean_loss(model, batch)
        if listener.steps != 2 or not model.training or os.environ["RANK"] == "0":
            return found
        model.queue.add_(1)
        return found * float("nan")

    options = {"on_nonfinite": "skip", "collective_timeout": 6, "target_batch": 8, "steps": 6}
    try:
        fit(make_workload(model=Queued, loss=loss), Path(out), listener=listener, **options)
    except AutobatchError as error:
        return type(error).__name__
    return "ended"


@pytest.mark.program
def test_all_ranks_end_a_step_that_cannot_be_skipped_alike(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(end_of_skipped_step, str(tmp_path / "run"), seconds=60)
    assert [rank.value for rank in ended] in (["NonFiniteError"] * 2, ["ended"] * 2), ended


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


def train_experts(out: str, parallel: str) -> Tensor | str:
    """Train on batches of which each rank has the samples of one expert; return how it ended."""
    workload = make_workload(model=Routed, train_data=halves(), sampler=list(range(16)))
    options = {"target_batch": 8, "max_micro_batch": 4, "steps": 2, "parallel": parallel, "seed": 3}
    try:
        return weights(fit(workload, Path(out), **options)[0].model)
    except InputError as error:
        return type(error).__name__


def test_ranks_may_each_use_another_part_of_a_model_unless_they_share_it(
    server: RankServer, tmp_path: Path
) -> None:
    """FSDP2 would add the gradient of one expert to that of the other."""
    workload = make_workload(model=Routed, train_data=halves())
    expected, _ = reference(workload, [range(8), range(8, 16)], mean_loss, seed=3)
    for found in server.values(train_experts, str(tmp_path / "replicate"), "replicate"):
        assert apart(found, expected) < 1e-12
    assert server.values(train_experts, str(tmp_path / "shard"), "shard") == ["InputError"] * 2
