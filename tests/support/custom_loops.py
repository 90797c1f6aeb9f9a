"""Training loops as a user writes them around `autobatch.batches`, and data that shows its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import IterableDataset

import autobatch
from autobatch import Loss, Plan, Workload
from autobatch.planning import make_plan
from tests.support.detection import detection, scenes, whole
from tests.support.training import TOKENS, Rows, make_workload, mean_loss, weights, whole_tokens

EXACT = 1e-12
"""Relative; everything is computed in float64."""
SAMPLES = 24
KINDS = {
    "mean": (make_workload(), mean_loss),
    "tokens": (make_workload(**TOKENS), whole_tokens),
    "terms": (detection(train_data=scenes(SAMPLES)), whole),
}
"""Workloads, each with its loss over a whole batch."""


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


def ids_by_batch(data: Any, plan: Plan, *, sampler: Any = None, **options: Any) -> list[list[int]]:
    """Return the samples of every batch, if each sample is its own index; train nothing."""
    workload = make_workload(train_data=data, sampler=sampler)
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    ids = []
    for batch in autobatch.batches(workload, plan, optimizer=unused, **options):
        ids.append([])
        for micro in batch:
            ids[-1] += micro.data.tolist()
            batch.backward(Loss(torch.zeros(()), 0))
        assert not batch.step().applied
    return ids


class Stream(IterableDataset[Tensor]):
    """The numbers from 0, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.samples))


class Gan:
    """A generator and a discriminator with their optimizers, alike each time, and their losses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        self.discriminator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.parts = [self.discriminator, self.generator]
        self.optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in self.parts]

    def judging(self, real: Tensor, noise: Tensor, _: Tensor) -> Tensor:
        """Return a mean over samples, which also reaches the generator, whose gradient must not count."""
        judged, fooled = self.discriminator(real), self.discriminator(self.generator(noise))
        return (softplus(-judged) + softplus(fooled)).mean()

    def fooling(self, _: Tensor, noise: Tensor, weight: Tensor) -> Loss:
        """Return a mean over weights."""
        fooled = softplus(-self.discriminator(self.generator(noise)))[:, 0]
        return Loss((fooled * weight).sum(), weight.sum())

    def weights(self) -> Tensor:
        return torch.cat([weights(part) for part in self.parts])


def gan_data(samples: int = SAMPLES) -> Rows:
    """Make real points, each with its noise and a weight that is 0 for some."""
    generator = torch.Generator().manual_seed(1)
    real, noise = (torch.randn(samples, n, dtype=torch.float64, generator=generator) for n in (5, 3))
    return Rows(real, noise, torch.arange(samples).double() % 3)


def train_gan(plan: Plan, data: Any, sampler: Any = None, *, clip: float | None = None) -> Tensor:
    """Train in the order of DCGAN."""
    gan, workload = Gan(), make_workload(train_data=data, sampler=sampler)
    of_both = [autobatch.batches(workload, plan, optimizer=each, epochs=2) for each in gan.optimizers]
    for pair in zip(*of_both, strict=True):
        for batch, loss in zip(pair, (gan.judging, gan.fooling), strict=True):
            for micro in batch:
                batch.backward(loss(*micro.data))
            batch.step(max_grad_norm=clip)
    return gan.weights()


def train_gan_on_whole_batches(batches: list[list[int]], *, clip: float | None = None) -> Tensor:
    """Train in the same order without autobatch, one pass over each whole batch."""
    gan, columns = Gan(), gan_data().columns
    for ids in batches:
        for part, optimizer, loss in zip(gan.parts, gan.optimizers, (gan.judging, gan.fooling), strict=True):
            for each in gan.parts:
                each.zero_grad()
            value = loss(*(column[ids] for column in columns))
            (value.total / value.count if isinstance(value, Loss) else value).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(part.parameters(), clip)
            optimizer.step()
    return gan.weights()


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
