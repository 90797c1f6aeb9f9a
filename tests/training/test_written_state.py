"""State that a forward pass writes: named, put back, refused if micro-batches see each other through it."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from autobatch import InputError
from autobatch.step.restore import BufferSnapshot
from autobatch.training.split_check import check_loss_splits
from autobatch.workload.order import GlobalBatchSampler
from tests.support.split_losses import examined
from tests.support.training import fingerprint, make_setup, make_workload, network


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


class Center(nn.Module):
    """A loss like that of DINO: scores beside a centre that each pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3, dtype=torch.float64))

    def forward(self, scores: Tensor, teacher: Tensor) -> Tensor:
        targets = ((teacher - self.center) / 0.04).softmax(1).detach()
        self.center = self.center * 0.9 + teacher.detach().mean(0, keepdim=True) * 0.1
        return -(targets * scores.log_softmax(1)).sum(1).mean()


class Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.center = network(), network(), Center()
        self.teacher.requires_grad_(False)


def dino(model: nn.Module, batch) -> Tensor:
    return model.center(model.student(batch[0]), model.teacher(batch[0]))


class Moco(nn.Module):
    """Queries against the keys of earlier passes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.register_buffer("queue", normalize(torch.randn(16, 3, dtype=torch.float64)))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        rows, keys = normalize(self.body(x)), normalize(self.body(x.flip(1)).detach())
        scores = torch.cat([(rows * keys).sum(1, keepdim=True), rows @ self.queue.T.clone()], dim=1) / 0.1
        places = (self.place + torch.arange(len(x))) % 16
        self.queue[places] = keys
        self.place += len(x)
        return scores


def moco(model: nn.Module, batch) -> Tensor:
    return cross_entropy(model(batch[0]), torch.zeros(len(batch[0]), dtype=torch.int64))


class Normed(nn.Module):
    """A spectral norm, whose vectors move with each pass, whatever the samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.spectral_norm(nn.Linear(5, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


KINDS = {
    "centre": ({"model": Dino, "loss": dino}, "center.center"),
    "queue": ({"model": Moco, "loss": moco}, "place, queue"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_through_which_micro_batches_see_each_other_is_refused_by_name(kind: str) -> None:
    fields, name = KINDS[kind]
    setup = make_setup(make_workload(**fields))
    sampler = GlobalBatchSampler(samples=24, target_batch=24, seed=0, steps=3)
    before = fingerprint(setup.model)
    with pytest.raises(InputError, match="micro-batches see each other through it") as caught:
        check_loss_splits(setup, micro_batch=8, sampler=sampler)
    assert f"the forward pass writes {name}, and" in str(caught.value)
    assert "after_step" in str(caught.value)
    assert fingerprint(setup.model) == before
    (note,) = check_loss_splits(setup, micro_batch=8, sampler=sampler, check="note")
    assert name in note
    (note,) = check_loss_splits(setup, micro_batch=24, sampler=sampler)
    assert "every batch is one micro-batch" in note


class Remembering(nn.Module):
    """A model that adds what it saw last, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen, self.own = network(), deque([0.0], maxlen=3), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.mean()) + float(torch.rand((), generator=self.own)))
        return self.body(x) * (1 + self.seen[0])


def test_what_a_model_keeps_in_attributes_is_put_back_at_the_end() -> None:
    setup = make_setup(make_workload(model=Remembering))
    before = setup.model.own.get_state()
    assert "keeps state between passes" in str(examined(setup).unchecked)
    assert list(setup.model.seen) == [0.0]
    assert torch.equal(setup.model.own.get_state(), before)


@pytest.mark.parametrize("replaces", [False, True])
def test_state_that_no_gradient_depends_on_is_a_remark(replaces: bool) -> None:
    setup = make_setup(make_workload(model=lambda: Teaching(replaces=replaces)))
    before = fingerprint(setup.model)
    found = examined(setup)
    assert fingerprint(setup.model) == before
    assert found.fault is None
    assert "writes queue, teacher.bias, teacher.weight in" in found.remark
    assert found.notes(is_split=False) == []


def test_state_that_no_sample_enters_is_a_remark() -> None:
    found = examined(make_setup(make_workload(model=Normed)))
    assert found.fault is None
    assert "body.weight_u, body.weight_v" in found.remark


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
