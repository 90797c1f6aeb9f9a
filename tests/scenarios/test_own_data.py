"""Whole runs on a stream of the user's, against the same batches trained by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autobatch
from autobatch import InputError
from tests.support.runs import fit
from tests.support.training import make_workload, mean_loss, points, reference, weights

SAMPLES = 20
POINTS = points(SAMPLES, seed=5)
OPTIONS: dict[str, Any] = {"target_batch": 6, "max_micro_batch": 4}


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
        fit(make_workload(train_data=stream), tmp_path / "run", **OPTIONS, **lengths)
    assert not (tmp_path / "run").exists()


def test_a_stream_that_a_plan_has_read_to_its_end_is_planned_as_data_and_an_empty_one_is_refused() -> None:
    options = {"target_batch": 6, "device": "cpu", "max_micro_batch": 4}
    found = autobatch.plan(make_workload(train_data=stream), **options)
    assert not [note for note in found.notes if "planned from" in note]
    with pytest.raises(InputError, match="has 0 samples: at least 1 is needed"):
        autobatch.plan(make_workload(train_data=lambda: iter([])), **options)


def test_a_run_in_steps_needs_no_end_of_the_stream(tmp_path: Path, scan: Any) -> None:
    scan(8)
    found, notes = fit(make_workload(train_data=endless), tmp_path, steps=5, **OPTIONS)
    assert any("planned from its first 8 samples" in note for note in notes)
    assert (found.training.optimizer_steps, found.training.samples) == (5, 30)
    batches = [[index % SAMPLES for index in range(at, at + 6)] for at in range(0, 30, 6)]
    expected, _ = reference(make_workload(train_data=POINTS), batches, mean_loss)
    assert torch.allclose(weights(found.model), expected, rtol=1e-12)


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
