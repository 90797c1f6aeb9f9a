"""Losses over a whole batch, accumulated in micro-batches, against one pass over it in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autobatch import InputError, WholeBatchLoss
from autobatch.step.train_step import train_step
from autobatch.workload.rng import seed_everything
from tests.support.steps import SAMPLES, split, step_of
from tests.support.training import features, info_nce, make_workload, train_state_of


class Stateful(nn.Module):
    """A model that draws from every generator and reads buffers that it changes: small, large, replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 4))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(2**18 + 4))

    def forward(self, inputs: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand())
        out = self.body(inputs) + noise * torch.randn(len(inputs), 4) + self.average + self.queue[:4]
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        self.queue[:4] += out.detach().sum(0)
        return out


def test_the_second_pass_repeats_the_first_and_leaves_no_trace() -> None:
    """Both passes give the same rows. Generators and buffers end as after a single pass."""
    seen: list[Tensor] = []

    def represent(model: nn.Module, batch: Any) -> Tensor:
        rows = model(batch[0])
        seen.append(rows.detach().clone())
        return rows

    def drawing(model: nn.Module, rows: Tensor) -> Tensor:
        return info_nce(model, rows) * torch.rand(()) * random.random()

    workload = make_workload(
        model=lambda: Stateful().double(), loss=WholeBatchLoss(represent=represent, loss=drawing)
    )
    train_state, alone = train_state_of(workload), train_state_of(workload).model
    for _ in range(2):
        alone.load_state_dict(train_state.model.state_dict())
        seen.clear()
        seed_everything(1)
        step_of(train_state, workload, [6] * 4)
        draws = torch.rand(3).tolist(), random.random(), np.random.rand()
        assert len(seen) == 8
        assert all(map(torch.equal, seen[:4], seen[4:]))
        seed_everything(1)
        for batch, _size in split(workload, [6] * 4):
            alone(batch[0])
        drawing(alone, seen[0])
        assert draws == (torch.rand(3).tolist(), random.random(), np.random.rand())
        assert all(map(torch.equal, train_state.model.buffers(), alone.buffers()))


@pytest.mark.parametrize(("size", "count"), [(4, 2), (5, 1), (12, 2), (13, 2), (23, 2)])
def test_rows_repeat_in_an_attempt_with_fewer_micro_batches_than_its_batch(size: int, count: int) -> None:
    seen: list[Tensor] = []

    def loss(_: nn.Module, rows: Tensor) -> Tensor:
        seen.append(rows.detach().clone())
        return rows.mean()

    workload = make_workload(loss=WholeBatchLoss(represent=features, loss=loss))
    train_state = train_state_of(workload)
    (batch,) = split(workload, [size])
    rows = train_state.model(batch[0][0]).detach()
    train_step(train_state, [batch] * count, SAMPLES)
    assert seen[-1].shape == (SAMPLES, 3)
    assert torch.equal(seen[-1].unique(dim=0), rows.unique(dim=0))


@pytest.mark.parametrize(
    ("represent", "loss", "said"),
    [
        (lambda m, b: m(b[0]).mean(), info_nce, r"for 12 samples, found \(\) of float64"),
        (lambda m, b: m(b[0])[1:], info_nce, r"for 12 samples, found \(11, 3\) of float64"),
        (lambda m, b: None, info_nce, "found nothing"),
        (lambda m, b: m(b[0])[:, : len(b[0]) - 9], info_nce, "pad them to one form"),
        (features, lambda m, rows: rows, r"must return a 0-d tensor, found a tensor of shape \(23, 3\)"),
        (features, lambda m, rows: None, "must return a 0-d tensor, found nothing"),
    ],
)
def test_an_invalid_part_is_refused_in_one_line(represent: Any, loss: Any, said: str) -> None:
    workload = make_workload(loss=WholeBatchLoss(represent=represent, loss=loss))
    with pytest.raises(InputError, match=said) as caught:
        step_of(train_state_of(workload), workload, [12, 11])
    assert "\n" not in str(caught.value)
