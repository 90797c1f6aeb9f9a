"""Runs that tune: the result reaches the plan, the training and a resumed run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import autobatch
from autobatch.planning import make_plan
from autobatch.tuning import fastest, learning_rate
from autobatch.tuning.learning_rate import short_run
from tests.support.training import make_setup
from tests.support.trials import SAMPLES, STEPS, linear_workload, signed, squares


@pytest.mark.program
def test_a_resumed_run_keeps_the_chosen_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autobatch.tuning.fastest.usable_cores", lambda: 4)
    best, find = {"loader_workers": 2}, fastest.Search.find
    chosen = lambda search: msgspec.structs.replace(find(search), best=best, changes=best)  # noqa: E731
    monkeypatch.setattr(fastest.Search, "find", chosen)
    seen: set[int] = set()
    options: dict[str, Any] = {
        "target_batch": 12,
        "device": "sim:rtx-4090",
        "memory_budget": "1GiB",
        "trials": 1,
        "knobs": ",".join(best),
    }
    first = autobatch.fit(signed(seen), steps=3, out=tmp_path / "run", **options)
    assert first.plan.knobs == best
    workers = seen - {os.getpid()}
    assert len(workers) == 2
    seen.clear()
    autobatch.fit(signed(seen), steps=6, out=tmp_path / "run", resume=True, **options)
    assert len(seen - {os.getpid()} - workers) == 2
    # Oracle: the same samples, drawn with the same seeds in this process.
    plain = {**options, "trials": 0, "knobs": None, "max_micro_batch": first.plan.micro_batch}
    autobatch.fit(signed(seen), steps=6, out=tmp_path / "plain", workers=1, **plain)
    run, alone = (load_file(tmp_path / folder / "model.safetensors") for folder in ("run", "plain"))
    assert run.keys() == alone.keys()
    assert all(torch.equal(run[name], alone[name]) for name in run)


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return squares(model, batch) * (1 + 0.1 * torch.rand(()))


def test_a_short_run_has_the_losses_of_fit(tmp_path: Path) -> None:
    """With the same weights, batches and random numbers, the last losses are equal bit for bit."""
    options = {"target_batch": 12, "max_micro_batch": 5, "steps": 8, "trials": 0, "seed": 3}
    autobatch.fit(linear_workload(loss=noisy), **options, device="cpu", out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    plan = make_plan(target_batch=12, micro_batch_limit=5, learning_rate=0.1)
    found = short_run(make_setup(linear_workload(loss=noisy)), plan, 3, 8)
    assert found == sum(loss * 12.0 for loss in losses[-2:]) / 24.0


def test_fit_trains_with_the_found_learning_rate_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_rate, "STEPS", STEPS)
    options = {"target_batch": SAMPLES, "trials": 0, "tune_lr": True, "steps": 3, "device": "cpu"}
    result = autobatch.fit(linear_workload(learning_rate=0.005), **options, out=tmp_path / "run")
    found = result.tuning.learning_rate
    assert (found.trials, found.steps, found.default) == (10, STEPS, 0.005)
    assert found.best > 0.02
    assert (result.plan.learning_rate, result.plan.learning_rate_rule) == (found.best, "tuned")
    assert result.plan.learning_rate_factor == pytest.approx(found.best / 0.005)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["learning_rate"] == found.best
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["tuning"]["learning_rate"]["best"] == found.best
    assert "10 learning rates tried in runs of 24 steps" in (tmp_path / "run" / "report.html").read_text()
