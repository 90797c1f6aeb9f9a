"""Whole runs over streams, against the same samples trained by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import autobatch
from autobatch.core.errors import InputError
from tests.scenarios.test_own_loaders import build, sgd, squares, weights_of

DRAW = torch.Generator().manual_seed(5)
POINTS = torch.randn(20, 4, generator=DRAW, dtype=torch.float64)
OPTIONS: dict[str, Any] = {"target_batch": 6, "device": "cpu", "trials": 0, "precision": "fp32"}


class Stream(IterableDataset[Any]):
    """Points, each with its target."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for row in POINTS:
                yield row[:3], row[3]
            if not self.endless:
                return


class Stateful(Stream):
    """Points that know their place."""

    place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.place < len(POINTS):
            row = POINTS[self.place]
            self.place += 1
            yield row[:3], row[3]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def workload(stream: Any, **fields: Any) -> autobatch.Workload:
    return autobatch.Workload(
        model=build, train_data=stream, loss=squares, optimizer=sgd, learning_rate=0.05, **fields
    )


def by_hand(steps: int, last: int = 6) -> Tensor:
    torch.manual_seed(0)
    model = build()
    optimizer = sgd(model.parameters(), 0.05)
    for step in range(steps):
        size = last if step == steps - 1 else 6
        rows = torch.stack([POINTS[(6 * step + place) % len(POINTS)] for place in range(size)])
        optimizer.zero_grad()
        squares(model, (rows[:, :3], rows[:, 3])).backward()
        optimizer.step()
    return weights_of(model)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("endless", [False, True])
def test_steps_need_no_end_of_the_stream(tmp_path: Path, endless: bool) -> None:
    result = autobatch.fit(
        workload(Stream(endless=endless)), steps=5, scan=8, max_micro_batch=4, out=tmp_path / "run", **OPTIONS
    )
    assert result.training is not None
    assert (result.training.optimizer_steps, result.training.samples) == (5, 30)
    assert torch.allclose(weights_of(result.model), by_hand(5), rtol=1e-12)


def test_epochs_end_with_the_stream_and_the_last_batch_is_weighted_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="autobatch"):
        result = autobatch.fit(
            workload(Stream()), epochs=2, scan=8, max_micro_batch=4, out=tmp_path / "run", **OPTIONS
        )
    assert "so the stream is read once to its end: give --steps if it has no end" in caplog.text
    assert result.training is not None
    assert (result.training.optimizer_steps, result.training.samples) == (7, 40)
    assert torch.allclose(weights_of(result.model), by_hand(7, last=4), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Stream, "so its first 4 samples were read again and skipped"),
        (Stateful, "the stream continues from its own state"),
    ],
)
def test_a_resumed_run_has_the_same_weights_and_says_how_it_found_its_place(
    tmp_path: Path, kind: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = autobatch.fit(workload(kind()), steps=6, out=tmp_path / "whole", **OPTIONS)
    autobatch.fit(workload(kind()), steps=4, out=tmp_path / "parts", **OPTIONS)
    with caplog.at_level(logging.INFO, logger="autobatch"):
        parts = autobatch.fit(workload(kind()), steps=6, out=tmp_path / "parts", resume=True, **OPTIONS)
    assert torch.equal(weights_of(parts.model), weights_of(whole.model))
    assert torch.allclose(weights_of(whole.model), by_hand(6), rtol=1e-12)
    assert words in "\n".join(caplog.messages)


def test_the_limit_is_not_the_number_of_samples_that_were_scanned() -> None:
    plan = autobatch.plan(workload(Stream()), target_batch=18, scan=5, device="cpu")
    assert (plan.micro_batch, plan.probe.limited_by) == (18, "target_batch")
    short = autobatch.plan(workload(Stream()), target_batch=48, scan=30, device="cpu")
    assert (short.probe.micro_batch, short.probe.limited_by) == (20, "dataset")


def test_a_split_by_size_needs_all_sizes() -> None:
    with pytest.raises(InputError, match="--split size needs the sizes of all samples, and the data are a"):
        autobatch.plan(workload(Stream()), target_batch=12, scan=8, split="size", device="cpu")
