"""Training loops as a user writes them around `autobatch.batches`, and data that shows its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from autobatch import Loss, Plan, Workload
from autobatch.planning import make_plan
from tests.support.training import (
    IGNORED,
    language_model,
    make_workload,
    mean_loss,
    token_loss,
    tokens,
    weights,
)

EXACT = 1e-12
"""Relative; everything is computed in float64."""
SAMPLES = 24


def small_plan(target: int = SAMPLES, limit: int = 5, *, last_batch: str = "carry", **changes: Any) -> Plan:
    """Plan batches of ``target`` samples in micro-batches of at most ``limit``."""
    planned = make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, **changes)
    return msgspec.structs.replace(planned, last_batch=last_batch)


def mean_over_tokens(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over all counted tokens of a whole batch."""
    ids, labels = batch
    return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


KINDS = {
    "mean": (make_workload(), mean_loss),
    "tokens": (
        make_workload(model=language_model, train_data=tokens(), loss=token_loss),
        mean_over_tokens,
    ),
}
"""Workloads, each with its loss over a whole batch."""


def train_in_own_loop(
    workload: Workload, batches: Any, *, clip: float | None = None
) -> tuple[Tensor, list[float]]:
    """Train as a user would in ten lines; return the weights and the losses."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    losses = []
    for batch in batches:
        for micro in batch:
            batch.backward(workload.loss(model, micro.data))
        losses.append(batch.step(optimizer, max_grad_norm=clip).loss)
    assert all(p.grad is None for p in model.parameters())
    return weights(model), losses


def walk(batches: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all micro-batches with their batch, and train nothing."""
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    for batch in batches:
        for micro in batch:
            yield batch, micro
            batch.backward(Loss(torch.zeros(()), 0))
        assert not batch.step(unused).applied


def ids_by_batch(batches: Any) -> list[list[int]]:
    """Return the samples of every batch, if each sample is its own index."""
    found: dict[int, list[int]] = {}
    for batch, micro in walk(batches):
        found.setdefault(batch.index, []).extend(micro.data.tolist())
    return list(found.values())


class Stream(IterableDataset[Tensor]):
    """The numbers from 0, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.samples))
