"""Gradients of chosen samples, against autograd on the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from torch import nn

from autobatch.device.cpu import SilentMeter
from autobatch.training.split_check.gradient import ELEMENTS, GradientRunner, PassType, open_runner
from autobatch.workload.contract import Loss
from tests.support.training import (
    INFO_NCE,
    TOKENS,
    apart,
    contrastive_loss,
    make_setup,
    make_workload,
    token_loss,
)

IDS = [3, 0, 11, 7, 5]


@contextmanager
def runner_of(workload, dtype: torch.dtype | None = None) -> Iterator[GradientRunner]:
    with open_runner(make_setup(workload), SilentMeter(), PassType(dtype, train_mode=True)) as runner:
        yield runner


def collated(workload, ids=IDS):
    return torch.utils.data.default_collate([workload.train_data[i] for i in ids])


def run(workload, dtype: torch.dtype | None = None):
    with runner_of(workload, dtype) as runner:
        return runner.run(collated(workload), len(IDS))


def by_autograd(workload, loss) -> torch.Tensor:
    """Return the gradient of a loss over the samples at once."""
    model = make_setup(workload).model
    loss(model, collated(workload)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_mean_is_weighed_by_its_samples() -> None:
    workload = make_workload()
    found = run(workload)
    assert apart(found.elements, by_autograd(workload, workload.loss)) < 1e-12
    assert (found.count, found.samples, found.weight) == (None, 5, 5.0)


def test_a_loss_is_weighed_by_its_count() -> None:
    workload = make_workload(**TOKENS)

    def mean(model, batch):
        loss = token_loss(model, batch)
        return loss.total / loss.count

    found = run(workload)
    counted = sum(int((workload.train_data[i][1] != -100).sum()) for i in IDS)
    assert apart(found.elements, by_autograd(workload, mean)) < 1e-12
    assert found.count == found.weight == counted


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 2]])
def test_two_passes_over_micro_batches_are_one_over_the_batch(sizes: list[int]) -> None:
    workload = make_workload(loss=INFO_NCE)
    ends = list(accumulate(sizes))
    parts = [(collated(workload, IDS[end - size : end]), size) for end, size in zip(ends, sizes, strict=True)]
    with runner_of(workload) as runner:
        found = runner.run_cached(parts, len(IDS))
    assert apart(found.elements, by_autograd(workload, contrastive_loss)) < 1e-12


def test_runs_leave_no_gradient_behind() -> None:
    workload = make_workload()
    with runner_of(workload) as runner:
        first, again = (runner.run(collated(workload), len(IDS)) for _ in range(2))
    assert torch.equal(first.elements, again.elements)


def test_a_loss_may_change_its_batch() -> None:
    def loss(model, batch):
        batch["inputs"].mul_(2.0)
        return model(batch.pop("inputs")).square().mean()

    workload = make_workload(loss=loss)
    batch = {"inputs": torch.ones(5, 5, dtype=torch.float64)}
    with runner_of(workload) as runner:
        runner.run(batch, 5)
    assert batch["inputs"].eq(1.0).all()


def test_a_loss_that_counts_nothing_has_no_gradient() -> None:
    workload = make_workload(loss=lambda model, batch: Loss(torch.zeros(()), 0))
    found = run(workload)
    assert (found.count, float(found.elements.norm())) == (0.0, 0.0)


def test_batches_are_converted_and_large_gradients_are_sampled() -> None:
    seen: list[torch.dtype] = []

    def loss(model, batch):
        seen.append(batch[0].dtype)
        return model(batch[0]).square().mean()

    workload = make_workload(model=lambda: nn.Linear(5, 3 * ELEMENTS, bias=False), loss=loss)
    found = run(workload, torch.float32)
    assert seen == [torch.float32]
    whole = make_setup(workload).model
    columns = workload.train_data.columns[0][IDS].float()
    whole(columns).square().mean().backward()
    assert ELEMENTS <= len(found.elements) < 2 * ELEMENTS
    stride = whole.weight.numel() // ELEMENTS
    assert apart(found.elements, whole.weight.grad.flatten()[::stride].double()) < 1e-6
