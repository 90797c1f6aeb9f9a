"""Training loops as a user writes them around `autobatch.batches`, and data that shows its order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autobatch
from autobatch import Loss, Plan, Workload
from autobatch.planning import make_plan
from tests.support.steps import SAMPLES
from tests.support.training import make_workload, weights


def small_plan(target: int = SAMPLES, limit: int = 5, **changes: Any) -> Plan:
    """Plan batches of ``target`` samples in micro-batches of at most ``limit``."""
    return make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, **changes)


def train_in_own_loop(
    workload: Workload, plan: Plan, *, clip: float | None = None, **options: Any
) -> tuple[Tensor, list[float]]:
    """Train as a user would in ten lines; return the weights and the losses."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    losses = []
    for batch in autobatch.batches(workload, plan, optimizer=optimizer, **options):
        for micro in batch:
            batch.backward(workload.loss(model, micro.data))
        losses.append(batch.step(max_grad_norm=clip).loss)
    assert all(p.grad is None for p in model.parameters())
    return weights(model), losses


def ids_by_batch(data: Any, plan: Plan, **options: Any) -> list[list[int]]:
    """Return the samples of every batch, if each sample is its own index; train nothing."""
    workload = make_workload(train_data=data)
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    ids = []
    for batch in autobatch.batches(workload, plan, optimizer=unused, **options):
        ids.append([])
        for micro in batch:
            ids[-1] += micro.data.tolist()
            batch.backward(Loss(torch.zeros(()), 0))
        assert not batch.step().applied
    return ids
