"""Temporary weights, snapshots of buffers, and random states are restored, whatever happened meanwhile."""

from __future__ import annotations

import random

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
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3).requires_grad_(requires_grad=False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, inputs):
        self.mean = self.mean + inputs.detach().mean(0)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(()))
            self.extra = nn.Linear(1, 1)
        self.head.requires_grad_(requires_grad=True)
        return self.head(self.drop(self.norm(self.second(self.first(inputs))))) * self.late


def in_use(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model in the middle of the user's own work: with gradients, and one module in eval mode."""
    torch.manual_seed(0)
    model = Tied()
    model.first.weight.grad = torch.randn(5, 5)
    model.norm.eval()
    return model.to(dtype)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("budget", ["1GiB", 1000, 400])
@pytest.mark.parametrize("micro_batch", [2, 20])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_attempt_leaves_the_model_and_the_generators_unchanged(budget, micro_batch, precision) -> None:
    workload = make_workload(
        model=in_use,
        train_data=points(dtype=torch.float32),
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr),
    )
    setup = make_setup(workload, budget, precision=precision, max_grad_norm=1.0)
    model = setup.model
    before = model_state(model)
    state = capture_random_state()
    expected = draws()
    restore_random_state(state)
    outcome = attempt(setup, micro_batch)
    assert outcome.attempt.fits == (budget == "1GiB")
    assert model_state(model) == before
    assert draws() == expected
    restore_random_state(state)


class Buffers(nn.Module):
    """A small and a large buffer, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(SMALL_BUFFER + 1))
        self.register_buffer("missing", None)


def test_small_buffers_are_restored_in_place_and_replaced_ones_too() -> None:
    model = Buffers()
    snapshot, small = BufferSnapshot(model), model.small
    snapshot.take()
    model.small.add_(1)
    model.small = torch.ones(3)
    model.missing = torch.ones(1)
    assert snapshot.restore()
    assert model.small is small
    assert small.tolist() == [0.0] * 3
    assert model.missing is None


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_large_buffer_is_copied_only_after_a_batch_has_changed_it(is_committed: bool) -> None:
    model = Buffers()
    snapshot = BufferSnapshot(model)
    snapshot.take()
    model.small.add_(1)
    model.large.add_(1)
    if is_committed:
        snapshot.commit()
        assert snapshot.restore(), "nothing is left to restore"
    else:
        assert not snapshot.restore(), "it has no copy yet"
    assert (model.small[0], model.large[0]) == (int(is_committed), 1)
    snapshot.take()
    model.large.add_(1)
    assert snapshot.restore()
    assert model.large[0] == 1


class Teaching(nn.Module):
    """A model with a teacher that follows it, and a queue of what it has seen, neither of which it reads."""

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.student = nn.Linear(5, 3, dtype=torch.float64)
        self.teacher = nn.Linear(5, 3, dtype=torch.float64).requires_grad_(False)
        self.fixed = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("queue", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    if self.replaces:
                        own.data = own.data * 0.9 + other.data * 0.1
                    else:
                        own.lerp_(other, 0.1)
                self.queue.copy_(torch.cat([self.queue[len(x) :], x[:, 0]])[-8:])
        return self.fixed(self.norm(self.student(x)) * self.mask)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("batches_before", [0, 1, 3])
def test_a_batch_that_runs_again_starts_from_the_same_teacher(replaces: bool, batches_before: int) -> None:
    torch.manual_seed(0)
    model = Teaching(replaces=replaces)
    snapshot = BufferSnapshot(model)
    inputs = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(batches_before):
        snapshot.take()
        model(inputs)
        model(inputs)
        snapshot.commit()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    snapshot.take()
    for _ in range(2):  # the second write may put the data back into the first memory
        model(inputs)
    assert snapshot.restore()
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
