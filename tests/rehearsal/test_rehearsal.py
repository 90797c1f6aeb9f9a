"""Attempts: the state they leave unchanged, the memory they count, and the errors of failures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobatch
from autobatch import InputError, Loss, Workload
from autobatch.core.options import Options
from autobatch.device.tracker import StorageTracker
from autobatch.rehearsal.rehearsal import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from tests.support.probes import vectors
from tests.support.probes import work as small
from tests.support.training import Augmented, adamw, mean_loss
from tests.support.untouched import digest, fingerprint, live_tensors, model_state, with_gradients


def work(model: nn.Module, **fields) -> Workload:
    return small(lambda: model, **{"train_data": Augmented(*vectors(120).columns), **fields})


def setup_of(workload: Workload, budget: str = "1GiB", **options) -> Setup:
    return open_setup(workload, Options(device="cpu", memory_budget=budget, **options))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


class Tied(nn.Module):
    """One weight under two names, features kept on the side, and parts that a forward pass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(()))
            self.extra = nn.Linear(1, 1)
        self.frozen.requires_grad_()
        self.last = self.second(self.first(x).relu())
        return self.last[:, :4]


@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")
@pytest.mark.parametrize(
    ("model", "device"), [(with_batch_norm, "cpu"), (with_batch_norm, "sim:t4"), (Tied, "sim:t4")]
)
def test_a_probe_changes_nothing(model: Callable[[], nn.Module], device: str) -> None:
    live = with_gradients(model())
    workload = replace(work(live), model=lambda: (torch.rand(7), live)[1])
    budget = "80KiB" if device == "cpu" else "2MiB"
    untouched = model_state(live)
    autobatch.probe(workload, device=device, memory_budget=budget)  # what is imported and cached comes first
    before, count = fingerprint(live), live_tensors()
    found = autobatch.probe(workload, device=device, memory_budget=budget, seed=3)
    assert found.micro_batch >= 2
    assert fingerprint(live) == before
    assert model_state(live) == untouched
    assert live_tensors() <= count


class OwnGenerator(Augmented):
    """Samples of a generator that the data keep for themselves."""

    def __init__(self) -> None:
        super().__init__(torch.arange(120))
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(16, generator=self.generator), index % 4


@pytest.mark.parametrize("budget", ["9KiB", "80KiB"])
def test_a_probe_leaves_an_optimizer_and_data_that_the_user_has_in_use(budget: str) -> None:
    """The function of the workload returns the user's own optimizer, in the middle of a training."""
    live, data = with_batch_norm(), OwnGenerator()
    optimizer = adamw(live.parameters(), 1e-3)
    mean_loss(live, torch.utils.data.default_collate([data[index] for index in range(4)])).backward()
    optimizer.step()

    def state() -> tuple[Any, ...]:
        held = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        return [id(one) for one in held], [digest(one) for one in held], digest(data.generator.get_state())

    before = state()
    with suppress(ValueError):  # of BatchNorm, if only one sample fits
        found = autobatch.probe(
            work(live, train_data=data, optimizer=lambda *_, **__: optimizer),
            device="cpu",
            memory_budget=budget,
        )
        assert found.micro_batch >= 2
    assert state() == before


@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")
def test_forty_out_of_memory_errors_leave_nothing_behind() -> None:
    live = with_gradients(Tied())
    setup = setup_of(work(live), "20KiB")
    attempt(setup, 100)
    before, count = fingerprint(live), live_tensors()
    outcomes = [attempt(setup, 80 + number) for number in range(40)]
    assert not any(outcome.attempt.fits for outcome in outcomes)
    assert fingerprint(live) == before
    assert live_tensors() <= count


# Memory that an attempt must count.


def test_the_optimizer_state_is_counted_although_the_costliest_samples_count_nothing() -> None:
    def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(model(batch[0]).sum() * 0, torch.zeros(()))

    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    outcome = attempt(setup_of(work(model, loss=masked)), 1)
    # The weights, two states of AdamW and the gradients.
    assert outcome.attempt.peak_allocated_bytes >= 4 * weights


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: mean_loss(m, b) * float("nan"), "loss is nan"),
        (lambda m, b: (m(b[0]) * 0).sum().sqrt(), "gradient is nan"),
        (lambda m, b: mean_loss(m, b).detach(), "no gradient"),
        (lambda m, b: Loss(torch.zeros(()), torch.zeros(())), r"none of the 2 costliest samples: .*size_of"),
    ],
)
def test_an_invalid_loss_is_an_input_error(loss, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attempt(setup_of(work(with_batch_norm(), loss=loss)), 2)


@pytest.mark.parametrize(
    ("hidden", "micro_batch", "budget", "phase"),
    [
        # Weights of 21 kB, activations of 65 kB each; gradients and two states of 21 kB each.
        (256, 64, 10_000, "setup"),
        (256, 64, 80_000, "forward"),
        (256, 64, 160_000, "backward"),
        (256, 64, 2**20, None),
        (2048, 2, 400 * 2**10, "optimizer"),
    ],
)
def test_a_failure_names_its_phase(hidden: int, micro_batch: int, budget: int, phase: str | None) -> None:
    model = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))
    failed = attempt(setup_of(work(model), str(budget)), micro_batch).attempt
    assert (failed.phase, failed.fits) == (phase, phase is None)


def test_a_lost_context_is_asked_nothing(monkeypatch) -> None:
    """After a sticky error every call to the driver raises that error again."""

    def sticky(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    made = setup_of(work(nn.Linear(16, 4), loss=sticky), "1MiB")
    monkeypatch.setattr(StorageTracker, "stats", sticky)
    monkeypatch.setattr(type(made.device), "release", sticky)
    outcome = attempt(made, 3)
    assert (outcome.attempt.fits, outcome.attempt.reason) == (False, "CUDA error: out of memory")
