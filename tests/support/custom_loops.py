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
from tests.support.detection import counts, detection, scenes, whole
from tests.support.training import (
    Rows,
    language_model,
    make_workload,
    mean_loss,
    token_loss,
    tokens,
    weights,
    whole_tokens,
)

EXACT = 1e-12
"""Relative; everything is computed in float64."""
SAMPLES = 24


def small_plan(target: int = SAMPLES, limit: int = 5, **changes: Any) -> Plan:
    """Plan batches of ``target`` samples in micro-batches of at most ``limit``."""
    return make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, **changes)


KINDS = {
    "mean": (make_workload(), mean_loss),
    "tokens": (
        make_workload(model=language_model, train_data=tokens(), loss=token_loss),
        whole_tokens,
    ),
    "terms": (detection(train_data=scenes(SAMPLES), counts=counts), whole),
}
"""Workloads, each with its loss over a whole batch."""


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


def walk(workload: Workload, plan: Plan, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all micro-batches with their batch, and train nothing."""
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    for batch in autobatch.batches(workload, plan, optimizer=unused, **options):
        for micro in batch:
            yield batch, micro
            batch.backward(Loss(torch.zeros(()), 0))
        assert not batch.step().applied


def ids_by_batch(data: Any, plan: Plan, *, sampler: Any = None, **options: Any) -> list[list[int]]:
    """Return the samples of every batch, if each sample is its own index."""
    workload = make_workload(train_data=data, sampler=sampler)
    found: dict[int, list[int]] = {}
    for batch, micro in walk(workload, plan, **options):
        found.setdefault(batch.index, []).extend(micro.data.tolist())
    return list(found.values())


class Stream(IterableDataset[Tensor]):
    """The numbers from 0, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.samples))


# a GAN


def gan_parts() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    """Build a generator, a discriminator and their optimizers, alike in every call."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    discriminator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (discriminator, generator)]
    return generator, discriminator, optimizers


def gan_data(samples: int = SAMPLES) -> Rows:
    """Make real points, each with its noise and a weight that is 0 for some."""
    generator = torch.Generator().manual_seed(1)
    real, noise = (torch.randn(samples, n, dtype=torch.float64, generator=generator) for n in (5, 3))
    return Rows(real, noise, torch.arange(samples).double() % 3)


def discriminator_loss(judged: Tensor, fooled: Tensor) -> Tensor:
    """Return the mean over the samples."""
    return (softplus(-judged) + softplus(fooled)).mean()


def train_gan(plan: Plan, data: Any, sampler: Any = None, *, clip: float | None = None) -> Tensor:
    """Train in the order of DCGAN; the loss of the generator is a mean over weights.

    The discriminator's loss also reaches the generator, whose gradients of it must not count.
    """
    generator, discriminator, both = gan_parts()
    workload = make_workload(train_data=data, sampler=sampler)
    of_both = [autobatch.batches(workload, plan, optimizer=one, epochs=2) for one in both]
    for judging, fooling in zip(*of_both, strict=True):
        for micro in judging:
            real, noise, _ = micro.data
            judging.backward(discriminator_loss(discriminator(real), discriminator(generator(noise))))
        judging.step(max_grad_norm=clip)
        for micro in fooling:
            _, noise, weight = micro.data
            fooled = softplus(-discriminator(generator(noise)))[:, 0]
            fooling.backward(Loss((fooled * weight).sum(), weight.sum()))
        fooling.step(max_grad_norm=clip)
    return torch.cat([weights(generator), weights(discriminator)])


def train_gan_on_whole_batches(batches: list[list[int]], *, clip: float | None = None) -> Tensor:
    """Train in the same order without autobatch, one pass over each whole batch."""
    generator, discriminator, optimizers = gan_parts()
    columns = gan_data().columns
    for ids in batches:
        real, noise, weight = (column[ids] for column in columns)
        for place, (part, optimizer) in enumerate(zip((discriminator, generator), optimizers, strict=True)):
            generator.zero_grad()
            discriminator.zero_grad()
            fooled = discriminator(generator(noise))
            if place == 0:
                discriminator_loss(discriminator(real), fooled).backward()
            else:
                ((softplus(-fooled)[:, 0] * weight).sum() / weight.sum()).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(part.parameters(), clip)
            optimizer.step()
    return torch.cat([weights(generator), weights(discriminator)])


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
