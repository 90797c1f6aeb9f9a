"""The engine that sums a batch at its end, against training on whole batches in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobatch.distributed.group import Group
from autobatch.workload.contract import Collated
from autobatch.workload.order import GlobalBatchSampler
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import (
    TOKENS,
    apart,
    make_workload,
    mean_loss,
    reference,
    token_loss,
    tokens,
    weights,
)

pytestmark = pytest.mark.distributed
CLIP = 0.3


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)).double()
    model[1].weight = model[0].weight
    return model


class Recomputed(nn.Module):
    """A model whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).double()
        self.last = nn.Linear(8, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, inputs, use_reentrant=False))


class Partly(nn.Module):
    """A model with a part that only some samples use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.unused = (nn.Linear(5, 3).double() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.common(inputs)
        rare = inputs[:, :1] > 1
        return found + torch.where(rare, self.rare(inputs), 0) if rare.any() else found


def last_tokens_only() -> Any:
    """Make sequences of which the last half counts nothing."""
    data = tokens()
    data.columns[1][12:] = -100
    return data


def whole_tokens(model: nn.Module, batch: Collated) -> Tensor:
    found = token_loss(model, batch)
    return found.total / found.count.clamp(min=1)  # no step if nothing counts, as with a gradient of zero


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "mean": ({}, mean_loss),
    "tokens": (TOKENS, whole_tokens),
    "nothing counts on a rank": ({**TOKENS, "train_data": last_tokens_only()}, whole_tokens),
    "tied": ({**TOKENS, "model": tied}, whole_tokens),
    "recomputed": ({"model": Recomputed}, mean_loss),
    "partly used": ({"model": Partly}, mean_loss),
}
LIMITS: list[Any] = [
    [5, 3, 1],
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in ([5, 3], [12, 12], [5, 5], [7, 2, 4], [7, 2, 4, 1], [1, 30, 30, 30])
    ),
]
BATCHES = [24, 7, 2]
"""Targets: a whole epoch, one with a short last batch, and one with fewer samples than ranks."""


PAIRS = [
    (name, sync)
    for name in CASES
    for sync in ("after", "overlap")
    if (name, sync) != ("partly used", "overlap")
]
Trained = list[tuple[int, Tensor, list[float]]]
"""Weights and losses for each target."""


def train_cases(limits: list[int]) -> dict[tuple[str, str], Trained]:
    """Train every case in one start of the ranks, which takes longer than a case."""
    group = open_group()
    found = {pair: train_case(group, *pair, limits) for pair in PAIRS}
    group.close()
    return found


def train_case(group: Group, name: str, sync: str, limits: list[int]) -> Trained:
    """Train with every target."""
    found = []
    for target in BATCHES:
        workload = make_workload(**CASES[name][0])
        loop = ranked_loop(
            group, workload, limits, target_batch=target, steps=None, epochs=1, max_grad_norm=CLIP, sync=sync
        )
        records = list(loop.run())
        found.append(
            (
                target,
                weights(loop.train_state.model),
                [record.loss if record.loss is not None else math.nan for record in records],
            )
        )
    return found


@pytest.fixture(scope="module", name="trained")
def trained_once(server: RankServer) -> Callable[..., list[dict[tuple[str, str], Trained]]]:
    """Return a function from the limits of the ranks to what each of them trained."""
    return cache(lambda *limits: server.values(train_cases, [*limits], world=len(limits), seconds=200))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("name", "sync"), PAIRS)
def test_ranks_train_as_one_process_on_whole_batches(
    trained: Callable[..., list[dict[tuple[str, str], Trained]]], name: str, sync: str, limits: list[int]
) -> None:
    changes, whole_loss = CASES[name]
    workload = make_workload(**changes)
    of_ranks = [one[name, sync] for one in trained(*limits)]
    for number, target in enumerate(BATCHES):
        sampler = GlobalBatchSampler(samples=24, target_batch=target, seed=0, epochs=1)
        expected, losses = reference(workload, [b.ids for b in sampler.batches()], whole_loss, clip=CLIP)
        for found in of_ranks:
            assert found[number][0] == target
            assert apart(found[number][1], expected) < 1e-12
            counted = [pair for pair in zip(found[number][2], losses, strict=True) if pair[1]]
            assert [pair[0] for pair in counted] == pytest.approx([pair[1] for pair in counted], rel=1e-12)
            assert torch.equal(found[number][1], of_ranks[0][number][1])
