"""Whole runs on a user's own loader or stream, against the same batches trained by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

import autobatch
from autobatch import FitResult, InputError, Workload
from autobatch.workload.order import sampler_order
from tests.support.runs import fit as fit_and_hear
from tests.support.training import make_workload, mean_loss, points, reference, weights

SAMPLES = 20
POINTS = points(SAMPLES, seed=5)
TWICE = torch.arange(2 * SAMPLES) % SAMPLES
"""The samples of two epochs in their order."""
PLAIN = {name: vars(make_workload())[name] for name in ("model", "loss", "optimizer", "learning_rate")}
OPTIONS: dict[str, Any] = {"target_batch": 6, "max_micro_batch": 4}


def fit(workload: Workload, out: Path, **options: Any) -> FitResult:
    return fit_and_hear(workload, out, **OPTIONS, **options)[0]


def by_hand(order: Sequence[int], seed: int = 0) -> Tensor:
    """Train on whole batches of the samples in an order by hand, and return the weights."""
    batches = [order[at : at + 6] for at in range(0, len(order), 6)]
    return reference(make_workload(train_data=POINTS), batches, mean_loss, seed=seed)[0]


def assert_trained(result: FitResult, expected: Tensor) -> None:
    assert torch.allclose(weights(result.model), expected, rtol=1e-12)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batches_are_those_of_the_sampler(tmp_path: Path, workers: int) -> None:
    sampler = WeightedRandomSampler([1.0, 9.0] * (SAMPLES // 2), 15)
    loader = DataLoader(POINTS, batch_size=4, sampler=sampler, num_workers=workers)
    workload = Workload.from_loader(loader, **PLAIN)
    result = fit(workload, tmp_path / "run", steps=5, seed=3)
    order = sampler_order(workload.sampler or (), SAMPLES, 3)
    assert result.plan.accumulation_steps == 2
    assert_trained(result, by_hand([*order(0), *order(1)][:30], seed=3))


# Streams.


def stream() -> Iterator[tuple[Tensor, ...]]:
    return (POINTS[index] for index in range(SAMPLES))


def endless() -> Iterator[tuple[Tensor, ...]]:
    return (POINTS[index % SAMPLES] for index in count())


@pytest.fixture
def scan(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what sets the number of samples that a plan looks at."""
    return lambda samples: monkeypatch.setattr("autobatch.workload.streams.SCAN", samples)


@pytest.mark.parametrize("lengths", [{}, {"epochs": 2}])
def test_a_run_over_a_stream_needs_steps(tmp_path: Path, lengths: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"does not tell how many samples .* --steps N"):
        fit(make_workload(train_data=stream), tmp_path / "run", **lengths)
    assert not (tmp_path / "run").exists()


def test_a_stream_that_a_plan_has_read_to_its_end_is_planned_as_data_and_an_empty_one_is_refused() -> None:
    options = {"target_batch": 6, "device": "cpu", "max_micro_batch": 4}
    found = autobatch.plan(make_workload(train_data=stream), **options)
    assert not [note for note in found.notes if "planned from" in note]
    with pytest.raises(InputError, match="has 0 samples: at least 1 is needed"):
        autobatch.plan(make_workload(train_data=lambda: iter([])), **options)


def test_a_run_in_steps_needs_no_end_of_the_stream(tmp_path: Path, scan: Any) -> None:
    scan(8)
    found, notes = fit_and_hear(make_workload(train_data=endless), tmp_path, steps=5, **OPTIONS)
    assert any("planned from its first 8 samples" in note for note in notes)
    assert (found.training.optimizer_steps, found.training.samples) == (5, 30)
    assert_trained(found, by_hand(TWICE[:30].tolist()))


def test_the_limit_is_that_of_the_same_samples_with_an_index(scan: Any) -> None:
    scan(64)
    data = points(64)

    def probe(train_data: Any) -> tuple[int, str]:
        made = make_workload(train_data=train_data)
        found = autobatch.probe(made, device="cpu", memory_budget="12KiB")
        return found.micro_batch, found.limited_by

    indexed = probe(data)
    assert indexed[1] == "memory"
    assert probe(lambda: (data[index % 64] for index in count())) == indexed
