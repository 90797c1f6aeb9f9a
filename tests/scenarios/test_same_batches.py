"""Runs train on the same batches, bit for bit, with and without the check of the split, and after a kill."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autobatch
from tests.support.training import Rows

STEPS = 6
OPTIONS: dict[str, Any] = {
    "target_batch": 8,
    "max_micro_batch": 4,
    "steps": STEPS,
    "trials": 0,
    "device": "cpu",
    "memory_budget": "64MiB",
    "checkpoint_every": 4,
}
POINTS = torch.arange(120, dtype=torch.float32).reshape(40, 3) / 60


class Augmented(Rows):
    """Points with noise of all global generators."""

    def __init__(self) -> None:
        super().__init__(POINTS)

    def __getitem__(self, index: int) -> Tensor:
        point = super().__getitem__(index)[0]
        return point * random.uniform(0.9, 1.1) + float(np.random.normal()) / 9 + torch.rand(3) / 9


def shuffled() -> Iterator[Tensor]:
    """Draw points out of a buffer, in which every earlier draw shows."""
    buffer = []
    for point in POINTS.repeat(3, 1):
        buffer.append(point)
        if len(buffer) > 10:
            yield buffer.pop(random.randrange(len(buffer)))


class Step(NamedTuple):
    """The digests of the micro-batches of a step, and its gradient."""

    batches: list[str]
    gradient: Tensor


def digest(batch: Tensor) -> str:
    return hashlib.sha256(batch.numpy().tobytes()).hexdigest()


class Recording(torch.optim.SGD):
    """SGD that writes down what ran on the weights that it trains."""

    logs: list[list[Step]] = []
    seen: list[tuple[int, str]] = []
    fails_at: int | None = None
    """Step in which the process ends, as if killed; None for none."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.log: list[Step] = []
        self.logs.append(self.log)

    def step(self, closure: Any = None) -> None:
        if len(self.log) == self.fails_at:
            raise SystemExit("killed")
        weight = self.param_groups[0]["params"][0]
        own = [digest for place, digest in self.seen if place == weight.data_ptr()]
        self.log.append(Step(own, weight.grad.clone()))
        self.seen.clear()
        super().step(closure)


def recorded(model: nn.Module, batch: Tensor) -> Tensor:
    Recording.seen.append((next(model.parameters()).data_ptr(), digest(batch)))
    return model(batch).square().sum(1).mean()


FIELDS: dict[str, Any] = {
    "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "loss": recorded,
    "optimizer": lambda params, learning_rate: Recording(params, lr=learning_rate),
    "learning_rate": 0.01,
}


def run(data: Any, out: Path, **options: Any) -> tuple[list[Step], Any, str]:
    """Fit; return what was trained, the result, and a digest of all generators at the end."""
    Recording.logs.clear()
    Recording.seen.clear()
    if isinstance(data, DataLoader):
        workload = autobatch.Workload.from_loader(data, **FIELDS)
    else:
        workload = autobatch.Workload(train_data=data, **FIELDS)
    result = autobatch.fit(workload, **{**OPTIONS, "out": str(out), **options})
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()]
    return Recording.logs[-1], result, repr(states)


def weights(result: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])


DATA: dict[str, Callable[[], Any]] = {
    "shuffle buffer": lambda: shuffled,
    "loader with workers": lambda: DataLoader(Augmented(), batch_size=5, shuffle=True, num_workers=2),
}


@pytest.fixture(autouse=True)
def impatient_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loader that is dropped wait for its workers for less than 5 seconds."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture(scope="module")
def checked_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Step], Any, str]]:
    """Return a function that trains a kind of data with the check, once."""
    return functools.cache(lambda kind: run(DATA[kind](), tmp_path_factory.mktemp("run") / "checked"))


@pytest.mark.parametrize("kind", DATA)
def test_the_check_changes_no_batch_and_draws_nothing(kind: str, checked_run, tmp_path: Path) -> None:
    checked, result, state = checked_run(kind)
    plain, other, expected = run(DATA[kind](), tmp_path / "plain", split_check="off")
    assert [step.batches for step in checked] == [step.batches for step in plain]
    assert len({tuple(step.batches) for step in checked}) == STEPS, "every batch has other samples"
    assert {len(step.batches) for step in checked} == {2}
    assert all(torch.equal(one.gradient, two.gradient) for one, two in zip(checked, plain, strict=True))
    assert torch.equal(weights(result), weights(other))
    assert state == expected, "as many numbers were drawn"


def test_the_batches_of_a_stream_are_those_that_it_yields(tmp_path: Path) -> None:
    """Steps were once trained on the numbers of the first, which a check had drawn again."""
    drawn: list[Tensor] = []

    def stream() -> Iterator[Tensor]:
        while True:
            drawn.append(torch.rand(3))
            yield drawn[-1]

    log, _, _ = run(stream, tmp_path, split_check="error")
    trained = torch.stack(drawn[-8 * STEPS :]).split(4)
    assert [batch for step in log for batch in step.batches] == list(map(digest, trained))
    assert len(drawn) == 1001 + 8 * STEPS, "the samples that were planned with, and those that were trained"


@pytest.mark.parametrize("kind", DATA)
def test_a_run_that_ended_in_the_middle_goes_on_with_the_same_batches(
    kind: str, checked_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected, _ = checked_run(kind)
    monkeypatch.setattr(Recording, "fails_at", 4)
    with pytest.raises((autobatch.AutobatchError, SystemExit)):
        run(DATA[kind](), tmp_path / "run")
    monkeypatch.setattr(Recording, "fails_at", None)
    first = Recording.logs[-1]
    rest, result, _ = run(DATA[kind](), tmp_path / "run", resume=True)
    assert [step.batches for step in first + rest] == [step.batches for step in whole]
    assert result.training.resumed_from is not None
    assert torch.equal(weights(result), weights(expected))
