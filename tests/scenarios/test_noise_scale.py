"""The noise scale that a run reports, against per-sample gradients of the same model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autobatch import Loss
from tests.support.training import make_loop, make_workload, points

SAMPLES = 400


class Points(torch.utils.data.Dataset[Tensor]):
    """Targets x of a mean, whose gradient at weight w is 2 (w − x)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.values = 0.3 + torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return (batch - self.weight).square().sum(dim=1)


@pytest.mark.parametrize("counted", [pytest.param(False, marks=pytest.mark.program), True])
def test_the_reported_noise_scale_is_that_of_the_samples(counted: bool) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor | Loss:
        each = model(batch)
        return Loss(each.sum(), len(each)) if counted else each.mean()

    workload = make_workload(
        model=Mean,
        train_data=Points(),
        loss=loss,
        # Steps so small that the weight, and so the noise scale, stays the same.
        optimizer=lambda params, _: torch.optim.SGD(params, lr=1e-9),
    )
    loop = make_loop(workload, target_batch=64, micro_batch=8, steps=800)
    list(loop.run())
    values = workload.train_data.values
    gradients = -2 * values
    true = gradients.var(dim=0, correction=1).sum() / gradients.mean(dim=0).square().sum()
    found = loop.noise.estimate()
    assert found.batches == 256 // 4 + (800 - 256) // 16
    assert found.low < true < found.high
    assert found.noise_scale == pytest.approx(float(true), rel=0.3)


def test_measuring_the_noise_changes_no_step() -> None:
    def weights(every: int) -> Tensor:
        loop = make_loop(make_workload(train_data=points()), target_batch=12, micro_batch=5, steps=9)
        loop.noise.every = every
        list(loop.run())
        return torch.cat([p.detach().flatten() for p in loop.train_state.model.parameters()])

    assert torch.equal(weights(1), weights(10**9))
