"""The whole pipeline: its options take effect, and runs that cannot be right are refused early."""

from __future__ import annotations

import errno
import itertools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import autobatch
from autobatch import InputError
from autobatch.api import pipeline
from autobatch.core.units import GiB, MiB
from tests.support.probes import Listener, work
from tests.support.training import apart, make_workload, mean_loss, points, weights

OPTIONS: dict[str, Any] = {"device": "cpu", "memory_budget": "1GiB", "target_batch": 512, "trials": 0}


def fit(workload, out: Path, **options: Any):
    return autobatch.fit(workload, **{**OPTIONS, "steps": 4, "out": str(out), **options})


SHORT: dict[str, Any] = {"target_batch": 32, "max_micro_batch": 16}


def test_a_resume_may_take_more_steps_and_smaller_micro_batches(tmp_path: Path) -> None:
    workload = make_workload(train_data=points(96))
    whole = fit(workload, tmp_path / "whole", **SHORT, steps=7)
    fit(workload, tmp_path / "two", **SHORT)
    finished = fit(workload, tmp_path / "two", **SHORT, resume=True)
    assert finished.training.samples == 4 * 32
    assert finished.training.samples_per_s > 0
    with pytest.raises(InputError, match=r"--ema .* does not match the checkpoint"):
        fit(workload, tmp_path / "two", **SHORT, ema=0.5, resume=True)
    longer = {**SHORT, "max_micro_batch": 5, "steps": 7}
    done = fit(workload, tmp_path / "two", **longer, resume=True)
    assert (done.plan.micro_batch, done.training.micro_batch, done.training.samples) == (5, 5, 7 * 32)
    assert apart(weights(done.model), weights(whole.model)) < 1e-12


def test_a_validation_without_data_is_noted(tmp_path: Path) -> None:
    heard = Listener()
    fit(make_workload(), tmp_path, **SHORT, validate_every=2, progress=heard)
    assert any(note.endswith("--validate-every") for note in heard.notes)


def test_a_resume_checks_the_loss_which_may_have_been_edited(tmp_path: Path) -> None:
    fit(make_workload(), tmp_path, **SHORT)
    edited = make_workload(loss=lambda model, batch: mean_loss(model, batch) * len(batch[0]))
    with pytest.raises(InputError, match="sum"):
        fit(edited, tmp_path, **SHORT, resume=True)


def test_training_has_the_budget_of_the_probe_whatever_is_free_by_then(tmp_path: Path, monkeypatch) -> None:
    """Each opening of the device would have another budget, because the free memory is never the same."""
    free = itertools.count(8 * GiB, 64 * MiB)

    def memory() -> SimpleNamespace:
        return SimpleNamespace(total_bytes=32 * GiB, available_bytes=next(free), source="a test")

    budgets: list[int] = []
    train_plan = pipeline.train_plan

    def train(setup: Any, *args: Any, **fields: Any):
        budgets.append(setup.device.budget_bytes)
        return train_plan(setup, *args, **fields)

    monkeypatch.setattr("autobatch.device.select.host_memory", memory)
    monkeypatch.setattr(pipeline, "train_plan", train)
    options = {**SHORT, "memory_budget": None}
    probed = fit(make_workload(), tmp_path, **options).device.budget_bytes
    fit(make_workload(), tmp_path, **options, resume=True)
    assert budgets == [probed, probed]


def test_the_result_on_disk_is_the_returned_one_also_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    done = fit(make_workload(), tmp_path / "run", **SHORT)
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored == json.loads(msgspec.json.encode(done.to_json()))
    assert (stored["out"], stored["checkpoints"]) == (str(tmp_path / "run"), [4])
    assert done.report == tmp_path / "run" / "report.html"
    assert done.report.exists()
    monkeypatch.setattr("autobatch.report.page.render", fails)
    heard = Listener()
    done = fit(make_workload(), tmp_path, **SHORT, steps=2, progress=heard)
    assert "No space left on device: 'rep" in heard.notes[-1]
    assert (done.report, done.training.optimizer_steps) == (None, 2)
    assert json.loads((tmp_path / "result.json").read_text())["training"]["optimizer_steps"] == 2


def test_the_words_that_resume_a_run_mean_the_same_in_a_shell() -> None:
    for name in ("$(touch hacked)", "a b", "it's", "; id", "--resume", "plain"):
        given = ["autobatch", "fit", f"{name}.py:w", "--target-batch", "8"]
        wanted = [*given, "--out", f"runs/{name}", "--resume"]
        assert shlex.split(pipeline.resume_hint(shlex.join(given), Path("runs", name))) == wanted
        hint = pipeline.resume_hint(shlex.join([*given, "--out=x y"]), Path("x y"))
        assert shlex.split(hint) == [*given, "--out=x y", "--resume"]


def test_a_tuning_runs_the_stages_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autobatch.tuning.learning_rate.RATES", 1)
    monkeypatch.setattr("autobatch.tuning.learning_rate.STEPS", 4)
    options = {"target_batch": 64, "device": "cpu", "memory_budget": "2MiB", "knobs": "micro_batch_shift"}
    for trials, tunes_rate in ((1, False), (0, True), (1, True)):
        found = autobatch.tune(work(), trials=trials, tune_lr=tunes_rate, **options)
        assert found.tuning is not None
        assert (found.tuning.trials, found.tuning.learning_rate is not None) == (trials, tunes_rate)
        assert sum(found.plan.micro_batches) == 64
