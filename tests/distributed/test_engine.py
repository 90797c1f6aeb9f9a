"""The engine of whole models, against training on whole batches in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import InputError
from autobatch.distributed.group import Group
from autobatch.workload.order import GlobalBatchSampler
from tests.support.detection import (
    Detector,
    counts,
    scenes,
    terms,
    whole,
)
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


def whole_tokens(model: nn.Module, batch: Any) -> Tensor:
    found = token_loss(model, batch)
    return found.total / found.count.clamp(min=1)  # no step if nothing counts, as with a gradient of zero


DETECTION: dict[str, Any] = {"model": lambda: Detector().double(), "train_data": scenes(24)}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "mean": ({}, mean_loss),
    "tokens": (TOKENS, whole_tokens),
    "nothing counts on a rank": ({**TOKENS, "train_data": last_tokens_only()}, whole_tokens),
    "tied": ({**TOKENS, "model": tied}, whole_tokens),
    "partly used": ({"model": Partly}, mean_loss),
    "terms": ({**DETECTION, "loss": terms, "counts": counts}, whole),
}
LIMITS: list[Any] = [
    [2, 2, 2],
    *(pytest.param(one, marks=pytest.mark.slow) for one in ([5, 3], [7, 2, 4, 1], [1, 30, 30, 30])),
]
BATCHES = [24, 7, 2]
"""Targets: a whole epoch, one with a short last batch, and one with fewer samples than ranks."""


Trained = list[tuple[Tensor, list[float | None]]]
"""Weights and losses for each target."""


def train_cases(limits: list[int]) -> dict[str, Trained]:
    """Train every case in one start of the ranks, which takes longer than a case."""
    group = open_group()
    found = {name: train_case(group, name, limits) for name in CASES}
    group.close()
    return found


def train_case(group: Group, name: str, limits: list[int]) -> Trained:
    """Train with every target."""
    found = []
    for target in BATCHES:
        workload = make_workload(**CASES[name][0])
        loop = ranked_loop(
            group, workload, limits, target_batch=target, steps=None, epochs=1, max_grad_norm=CLIP
        )
        losses = [record.loss for record in loop.run()]
        found.append((weights(loop.train_state.model), losses))
    return found


@pytest.fixture(scope="module", name="trained")
def trained_once(server: RankServer) -> Callable[..., list[dict[str, Trained]]]:
    """Return a function from the limits of the ranks to what each of them trained."""
    return cache(lambda *limits: server.values(train_cases, [*limits], world=len(limits), seconds=200))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_on_whole_batches(
    trained: Callable[..., list[dict[str, Trained]]], name: str, limits: list[int]
) -> None:
    changes, whole_loss = CASES[name]
    workload = make_workload(**changes)
    of_ranks = [one[name] for one in trained(*limits)]
    for number, target in enumerate(BATCHES):
        sampler = GlobalBatchSampler(samples=24, target_batch=target, seed=0, epochs=1)
        expected, losses = reference(workload, [b.ids for b in sampler.batches()], whole_loss, clip=CLIP)
        for own, of_own in (found[number] for found in of_ranks):
            assert apart(own, expected) < 1e-12
            counted = [pair for pair in zip(of_own, losses, strict=True) if pair[1]]
            assert [pair[0] for pair in counted] == pytest.approx([pair[1] for pair in counted], rel=1e-12)
            assert torch.equal(own, of_ranks[0][number][0])


def count_reductions(steps: int) -> list[tuple[int, int]]:
    """Train batches of several micro-batches; return the micro-batches and the reductions of each."""
    group = open_group()
    loop, sums = ranked_loop(group, make_workload(), [2, 2], target_batch=12, steps=steps), list[int]()
    start, real = loop.run(), torch.distributed.all_reduce

    def counted(tensor: Tensor, *given: Any, **more: Any) -> Any:
        sums.append(tensor.numel())
        return real(tensor, *given, **more)

    torch.distributed.all_reduce = counted
    found = []
    for record in start:
        found.append((record.accumulation_steps, len(sums)))
        sums.clear()
    torch.distributed.all_reduce = real
    group.close()
    return found


def test_a_batch_is_reduced_once_over_the_ranks(server: RankServer) -> None:
    """One reduction per micro-batch, as of DDP without ``no_sync``, would be three."""
    for of_rank in server.values(count_reductions, 4):
        assert of_rank == [(3, 1)] * 4


def train_unlike() -> list[str]:
    """Build a model of another size on rank 1, and train a loss that has fewer terms there."""
    group, said = open_group(), list[str]()

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return {"first": value} if group.rank else {"first": value, "second": value}

    loop = ranked_loop(group, make_workload(loss=loss), [4, 4], target_batch=8, steps=1)
    model = nn.Linear(5, 3 + group.rank)
    for act in (lambda: loop.engine.ranks.send(model.parameters()), lambda: list(loop.run())):
        try:
            act()
        except InputError as error:
            said.append(str(error))
    return said


def test_models_and_losses_of_unlike_ranks_are_refused_on_every_rank(server: RankServer) -> None:
    for of_model, of_loss in server.values(train_unlike):
        assert "rank 1 has 2 tensors of 24 elements" in of_model
        assert "other terms on one rank than on another" in of_loss
