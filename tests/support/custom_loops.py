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


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021) over SGD, with the methods that its ports have."""

    def __init__(self, params: Any, *, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack([p.grad.norm() for p in self._trained()]).norm()
        for p in self._trained():
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for p in self._trained():
            p.copy_(self.state[p]["before"])
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "sharpness-aware minimization requires a closure"
