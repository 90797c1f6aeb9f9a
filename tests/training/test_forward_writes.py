"""State that a forward pass writes: named before training, and put back when a batch runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch.step.restore import BufferSnapshot
from autobatch.training.forward_writes import forward_write_notes, written_in_forward
from tests.support.training import make_workload
from tests.support.trials import setup_of


class Teaching(nn.Module):
    """A model with a teacher that follows it, and a queue of what it has seen, as MoCo has them."""

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.student = nn.Linear(5, 2, dtype=torch.float64)
        self.teacher = nn.Linear(5, 2, dtype=torch.float64).requires_grad_(False)
        self.fixed = nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
        self.register_buffer("queue", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(2, dtype=torch.float64))

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


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("replaces", [False, True])
def test_what_is_written_is_named_once_without_batch_norm(replaces: bool) -> None:
    setup = setup_of(make_workload(model=lambda: Teaching(replaces=replaces), loss=loss))
    before = [tensor.clone() for tensor in setup.model.state_dict().values()]
    assert written_in_forward(setup) == (["queue"], ["teacher.weight", "teacher.bias"])
    after = setup.model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    (note,) = forward_write_notes(setup, 3)
    assert note.startswith(
        "the forward pass writes the buffer queue and the frozen parameters teacher.weight, teacher.bias: "
        "each of the 3 micro-batches of a step"
    )
    assert forward_write_notes(setup, 1) == []


def test_a_model_that_writes_nothing_has_no_note() -> None:
    assert forward_write_notes(setup_of(make_workload()), 3) == []


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


def test_a_large_teacher_is_known_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autobatch.step.restore.SMALL_BUFFER", 0)
    model = Teaching()
    snapshot = BufferSnapshot(model)
    inputs = torch.randn(4, 5, dtype=torch.float64)
    snapshot.take()
    model(inputs)
    assert not snapshot.restore(), "nothing large is copied on suspicion"
    before = model.teacher.weight.clone()
    snapshot.take()
    model(inputs)
    assert snapshot.restore()
    assert torch.equal(model.teacher.weight, before)


def test_a_traced_model_has_no_memory_to_ask_for() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Teaching()
        snapshot = BufferSnapshot(model)
        snapshot.take()
        model(torch.randn(4, 5, dtype=torch.float64))
        snapshot.commit()
        snapshot.take()
        assert snapshot.restore()
