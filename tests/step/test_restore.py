"""Temporary weights, snapshots of buffers, and random states are restored, whatever happened meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autobatch.rehearsal.attempt import attempt
from autobatch.step.restore import SMALL_BUFFER, BufferSnapshot
from autobatch.workload.rng import capture_random_state, restore_random_state
from tests.support.training import make_setup, make_workload, points
from tests.support.untouched import model_state


class Tied(nn.Module):
    """A model with ties, a frozen part, statistics, and buffers that a forward pass replaces and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3).requires_grad_(requires_grad=False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = self.mean + inputs.detach().mean(0)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(()))
            self.extra = nn.Linear(1, 1)
        self.head.requires_grad_(requires_grad=True)
        return self.head(self.drop(self.norm(self.second(self.first(inputs))))) * self.late


def in_use() -> nn.Module:
    """Return a model in the middle of the user's own work: with gradients, and one module in eval mode."""
    torch.manual_seed(0)
    model = Tied()
    model.first.weight.grad = torch.randn(5, 5)
    model.norm.eval()
    return model


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("budget", ["1GiB", 1000, 400])
@pytest.mark.parametrize(("precision", "micro_batch"), [("fp32", 2), ("bf16", 20), ("fp16", 20)])
def test_an_attempt_leaves_the_model_and_the_generators_unchanged(
    budget: str | int, micro_batch: int, precision: str
) -> None:
    workload = make_workload(
        model=in_use,
        train_data=points(dtype=torch.float32),
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr),
    )
    setup = make_setup(workload, budget, precision=precision, max_grad_norm=1.0)
    before = model_state(setup.model)
    state = capture_random_state()
    expected = draws()
    restore_random_state(state)
    outcome = attempt(setup, micro_batch)
    assert outcome.attempt.fits == (budget == "1GiB")
    assert model_state(setup.model) == before
    assert draws() == expected
    restore_random_state(state)


class Buffers(nn.Module):
    """A small and a large buffer, one that is None, and a frozen parameter of a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(SMALL_BUFFER + 1))
        self.register_buffer("missing", None)
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)


def write_small(model: Buffers) -> None:
    model.small.add_(1)
    model.small = torch.ones(3)
    model.missing = torch.ones(1)


def write_large(model: Buffers) -> None:
    model.large.add_(1)


def write_teacher(model: Buffers) -> None:
    model.teacher.add_(1)


def replace_teacher(model: Buffers) -> None:
    for _ in range(2):  # the second write may put the data back into the first memory
        model.teacher.data = model.teacher.data + 1


@pytest.mark.parametrize("copy_all", [False, True])
@pytest.mark.parametrize("write", [write_small, write_large, write_teacher, replace_teacher])
def test_what_a_batch_writes_is_restored_or_told(write: Callable[[Buffers], None], copy_all: bool) -> None:
    model = Buffers()
    snapshot, small = BufferSnapshot(model, copy_all=copy_all), model.small
    for _ in range(2):
        snapshot.take()
        write(model)
        is_restored = copy_all or write is write_small
        assert snapshot.restore() == is_restored
        if is_restored:
            assert model.small is small
            assert model.missing is None
            assert not any(tensor.any() for tensor in (model.small, model.large, model.teacher))
    snapshot.take()
    write(model)
    snapshot.commit()
    assert snapshot.restore(), "nothing is left to restore"
