"""Runs train on the same batches, bit for bit, with and without the check of the split, and after a kill."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

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
    "precision": "fp32",
    "checkpoint_every": 4,
}
POINTS = torch.arange(120, dtype=torch.float32).reshape(40, 3) / 60


class Augmented(Rows):
    """Points with noise of all global generators."""

    def __init__(self) -> None:
        super().__init__(POINTS)

    def __getitem__(self, index: int) -> Tensor:
        return noisy(super().__getitem__(index)[0])


class Stream(IterableDataset[Any]):
    """Points in an order and with noise of all global generators."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(25):
            yield noisy(POINTS[int(torch.randint(40, ()))])


def noisy(point: Tensor) -> Tensor:
    return point * random.uniform(0.9, 1.1) + float(np.random.normal()) / 9 + torch.rand(3) / 9


def shuffled() -> Iterator[Tensor]:
    """Draw points out of a buffer, in which every earlier draw shows."""
    buffer = []
    for point in POINTS.repeat(3, 1):
        buffer.append(point)
        if len(buffer) > 10:
            yield buffer.pop(random.randrange(len(buffer)))


def sequence(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum(1).mean()


class Log:
    """The micro-batches and the gradient of each step of one optimizer."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gradients: list[Tensor] = []


class Recording(torch.optim.SGD):
    """SGD that writes down what ran on the weights that it trains."""

    logs: list[Log] = []
    seen: list[tuple[int, str]] = []
    fails_at: int | None = None
    """Step in which the process ends, as if killed; None for none."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.log = Log()
        Recording.logs.append(self.log)

    def step(self, closure: Any = None) -> None:
        if len(self.log.batches) == self.fails_at:
            raise SystemExit("killed")
        (weight, *_), seen = self.param_groups[0]["params"], Recording.seen
        self.log.batches.append([digest for place, digest in seen if place == weight.data_ptr()])
        self.log.gradients.append(weight.grad.clone())
        seen.clear()
        super().step(closure)


def recorded(model: nn.Module, batch: Tensor) -> Tensor:
    digest = hashlib.sha256(batch.numpy().tobytes()).hexdigest()
    Recording.seen.append((next(model.parameters()).data_ptr(), digest))
    return sequence(model, batch)


def fields() -> dict[str, Any]:
    return {
        "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
        "loss": recorded,
        "optimizer": lambda params, learning_rate: Recording(params, lr=learning_rate),
        "learning_rate": 0.01,
    }


def over(data: Callable[[], Any]) -> Callable[[], autobatch.Workload]:
    return lambda: autobatch.Workload(train_data=data(), **fields())


def loaded(data: Callable[[], Any], **options: Any) -> Callable[[], autobatch.Workload]:
    return lambda: autobatch.Workload.from_loader(DataLoader(data(), batch_size=5, **options), **fields())


KINDS: dict[str, Callable[[], autobatch.Workload]] = {
    "shuffle buffer": over(lambda: shuffled),
    "loader with workers": loaded(Augmented, shuffle=True, num_workers=2),
    "loader of a stream with workers": loaded(Stream, num_workers=1),
}
ALL_KINDS = [
    pytest.param(kind, marks=pytest.mark.program) if kind == "loader of a stream with workers" else kind
    for kind in KINDS
]
"""The slowest with the programs."""


def run(kind: str, out: Path, **options: Any) -> tuple[Log, Any, str]:
    """Fit; return what was trained, the result, and a digest of all generators at the end."""
    Recording.logs.clear()
    Recording.seen.clear()
    result = autobatch.fit(KINDS[kind](), **{**OPTIONS, "out": str(out), **options})
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()]
    return Recording.logs[-1], result, hashlib.sha256(repr(states).encode()).hexdigest()


def weights(result: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])


@pytest.fixture(autouse=True)
def impatient_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a loader that is dropped wait for its workers for less than 5 seconds."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture(scope="module")
def checked_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Log, Any, str]]:
    """Return a function that trains a kind of data with the check, once."""
    return functools.cache(lambda kind: run(kind, tmp_path_factory.mktemp("run") / "checked"))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_check_changes_no_batch_and_draws_nothing(kind: str, checked_run, tmp_path: Path) -> None:
    checked, result, state = checked_run(kind)
    plain, other, expected = run(kind, tmp_path / "plain", split_check="off")
    assert len(checked.batches) == len(plain.batches) == STEPS
    assert all(len(batch) == 2 for batch in checked.batches)
    assert checked.batches == plain.batches
    assert len({tuple(batch) for batch in checked.batches}) == STEPS, "every batch has other samples"
    assert all(map(torch.equal, checked.gradients, plain.gradients))
    assert torch.equal(weights(result), weights(other))
    assert state == expected, "as many numbers were drawn"


def test_the_batches_of_a_stream_are_those_that_it_yields(tmp_path: Path) -> None:
    """Steps were once trained on the numbers of the first, which a check had drawn again."""
    drawn: list[Tensor] = []

    def stream() -> Iterator[Tensor]:
        while True:
            drawn.append(torch.rand(3))
            yield drawn[-1]

    KINDS["counted"] = over(lambda: stream)
    try:
        log, _, _ = run("counted", tmp_path, split_check="error")
    finally:
        del KINDS["counted"]
    trained = drawn[-8 * STEPS :]
    digests = [
        hashlib.sha256(torch.stack(trained[at : at + 4]).numpy().tobytes()).hexdigest()
        for at in range(0, 8 * STEPS, 4)
    ]
    assert [digest for batch in log.batches for digest in batch] == digests
    assert len(drawn) == 1001 + 8 * STEPS, "the samples that were planned with, and those that were trained"


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_run_that_ended_in_the_middle_goes_on_with_the_same_batches(
    kind: str, checked_run, tmp_path: Path
) -> None:
    whole, expected, _ = checked_run(kind)
    Recording.fails_at = 4
    try:
        with pytest.raises((autobatch.AutobatchError, SystemExit)):
            run(kind, tmp_path / "run")
    finally:
        Recording.fails_at = None
    first = Recording.logs[-1]
    rest, result, _ = run(kind, tmp_path / "run", resume=True)
    assert first.batches + rest.batches == whole.batches
    assert result.training.resumed_from is not None
    assert torch.equal(weights(result), weights(expected))
