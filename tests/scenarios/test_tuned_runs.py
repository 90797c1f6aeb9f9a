"""Runs that tune: the result reaches the plan, the training and a resumed run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import autobatch
from autobatch import InputError, Progress, WholeBatchLoss
from autobatch.api.call import Call
from autobatch.api.pipeline import run as run_command
from autobatch.core.check_options import options_from
from autobatch.core.options import Options
from autobatch.device.simulated import SimulatedDevice
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.report.result import load_run
from autobatch.tuning import tune_plan
from autobatch.tuning.find_fastest import TuningResult
from autobatch.tuning.learning_rate import LrTrialSpec, ShortRuns, result_of
from tests.support.probes import Listener
from tests.support.training import make_setup
from tests.support.trials import (
    SAMPLES,
    STEPS,
    linear_workload,
    open_journal,
    signed,
    squares,
    trial_workload,
)

TRACED = 1
"""The process id that a trace on fake tensors reads from every sample."""


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Return a function that fixes what the tuner chooses."""

    def fix(best: dict[str, Any]) -> None:
        real = tune_plan.find_fastest

        def chosen(*given: Any, **more: Any) -> TuningResult:
            found = real(*given, **more)
            return TuningResult(msgspec.structs.replace(found.tuning, best=best), 5)

        monkeypatch.setattr(tune_plan, "find_fastest", chosen)

    return fix


@pytest.mark.usefixtures("no_pictures")
def test_the_plan_takes_over_the_chosen_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tuning keeps the target batch and writes a report, and a second call has nothing left to try."""
    monkeypatch.setattr(tune_plan, "TRIAL_SECONDS", 0.01)
    out = tmp_path / "tuned"
    first = autobatch.tune(
        trial_workload(), target_batch=48, memory_budget=400_000, device="cpu", trials=2, seed=1, out=out
    )
    assert first.tuning is not None
    assert first.plan is not None
    assert load_run(out).tuning == first.tuning
    assert first.report == out / "report.html"
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "result.json"]
    assert (sum(first.plan.micro_batches), first.plan.effective_batch) == (48, 48)
    assert first.tuning.trials == 2
    started: list[int] = []
    progress = Progress()
    monkeypatch.setattr(progress, "measured", lambda *given: started.append(given[0]), raising=False)
    options = options_from(
        "tune", {"target_batch": 48, "memory_budget": 400_000, "device": "cpu", "trials": 2, "seed": 1}
    )
    again = run_command(Call(workload=trial_workload(), options=options, progress=progress))
    assert again.tuning is not None
    assert (again.tuning.study, again.tuning.history, started) == (
        first.tuning.study,
        first.tuning.history,
        [],
    )


@pytest.mark.program
def test_a_resumed_run_keeps_the_chosen_configuration(
    choose: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autobatch.tuning.trial.usable_cores", lambda: 4)
    best = {"loader_workers": 2, "expandable_segments": True}
    choose(best)
    seen: set[int] = set()
    segments: list[bool] = []
    training = SimulatedDevice.training
    monkeypatch.setattr(
        SimulatedDevice,
        "training",
        lambda self: segments.append(self.new_allocator().config.expandable_segments) or training(self),
    )
    options: dict[str, Any] = {
        "target_batch": 12,
        "device": "sim:rtx-4090",
        "memory_budget": "1GiB",
        "trials": 1,
        "knobs": ",".join(best),
    }
    first = autobatch.fit(signed(seen), steps=3, out=tmp_path / "run", **options)
    assert first.plan is not None
    assert first.plan.knobs == best
    workers = seen - {os.getpid(), TRACED}
    assert len(workers) == 2
    assert segments[-1] is True
    seen.clear()
    segments.clear()
    autobatch.fit(signed(seen), steps=6, out=tmp_path / "run", resume=True, **options)
    assert len(seen - {os.getpid(), TRACED} - workers) == 2
    assert segments[-1] is True
    # Oracle: the same samples, drawn with the same seeds in this process.
    plain = {**options, "trials": 0, "knobs": None, "max_micro_batch": first.plan.micro_batch}
    autobatch.fit(signed(seen), steps=6, out=tmp_path / "plain", sample_seeds=True, **plain)
    weights = [tmp_path / folder / "model.safetensors" for folder in ("run", "plain")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return squares(model, batch) * (1 + 0.1 * torch.rand(()))


WHOLE = WholeBatchLoss(
    represent=lambda model, batch: (model(batch[0]), batch[1]),
    loss=lambda model, rows: ((rows[0] - rows[1]) ** 2).mean() + rows[0].var(),
)


@pytest.mark.parametrize("loss", [noisy, WHOLE], ids=["mean", "whole"])
def test_a_short_run_has_the_losses_of_fit(loss: Any, tmp_path: Path) -> None:
    """With the same weights, batches and random numbers, the losses are equal bit for bit."""
    options = {"target_batch": 12, "max_micro_batch": 5, "steps": 8, "trials": 0, "seed": 3}
    autobatch.fit(linear_workload(loss=loss), **options, device="cpu", out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ran = [(json.loads(line)["loss"], 12.0) for line in lines]
    plan = make_plan(target_batch=12, micro_batch_limit=5, learning_rate=0.1)
    process = ThisProcess(make_setup(linear_workload(loss=loss)))
    assert ShortRuns(process, LrTrialSpec(plan, steps=8))(0.1, 3) == result_of(0.1, ran)


def options(**more: Any) -> Options:
    fields = {"target_batch": 32, "device": "cpu", "trials": 1, "knobs": "", "tune_lr": True, **more}
    return options_from("tune", {name: value for name, value in fields.items() if value != ""})


def test_an_interrupt_keeps_the_default_learning_rate_and_earlier_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def interrupted(*given: Any) -> None:
        calls.append(given)
        raise KeyboardInterrupt

    progress = Listener()
    monkeypatch.setattr(ShortRuns, "__call__", interrupted)
    storage = str(tmp_path / "s.log")
    asked = options(storage=storage, study="study")
    result = run_command(Call(workload=linear_workload(), options=asked, progress=progress))
    assert calls
    assert result.plan is not None
    assert result.tuning is not None
    assert (result.plan.learning_rate, result.tuning.trials, result.tuning.learning_rate) == (0.1, 1, None)
    assert progress.notes[-1] == "interrupted: kept the learning rate"
    assert open_journal(tmp_path / "s.log", "study-learning-rate").trials[0].state is TrialState.FAIL


class Striking(Listener):
    """Listener that deletes a storage after the first trial or rate."""

    def __init__(self, storage: Path) -> None:
        super().__init__()
        self.storage = storage

    def measured(self, *_: Any) -> None:
        self.storage.unlink(missing_ok=True)

    tried_rate = measured


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"trials": 3}, marks=pytest.mark.program, id="configurations"),
        pytest.param({"trials": 0, "tune_lr": True, "lr_trials": 3}, id="learning rates"),
    ],
)
def test_a_storage_that_is_gone_in_the_middle_ends_tune_and_not_the_training(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    common = {**asked, "target_batch": SAMPLES, "device": "cpu", "storage": str(tmp_path / "s.log")}
    heard = Striking(tmp_path / "s.log")
    with pytest.raises(InputError, match=r"s\.log of the study failed: FileNotFound.*repeat the command"):
        autobatch.tune(linear_workload(), **common, progress=heard)
    result = autobatch.fit(linear_workload(), **common, steps=3, out=tmp_path / "run", progress=heard)
    assert result.training is not None
    assert result.training.optimizer_steps == 3
    assert result.tuning is None
    assert result.plan is not None
    assert result.plan.learning_rate_rule == "none"
    (line,) = [line for line in heard.notes if "of the study failed" in line]
    assert line.endswith("The training goes on with the plan as it is")


def test_fit_trains_with_the_found_learning_rate_and_reports_it(tmp_path: Path) -> None:
    options = {"target_batch": SAMPLES, "trials": 0, "tune_lr": True, "lr_trials": 6, "lr_steps": STEPS}
    workload = linear_workload(learning_rate=0.005)
    result = autobatch.fit(workload, **options, steps=3, device="cpu", out=tmp_path / "run")
    assert result.plan is not None
    assert result.tuning is not None
    found = result.tuning.learning_rate
    assert found is not None
    assert (found.trials, found.steps, found.default) == (6, STEPS, 0.005)
    assert found.best > 0.02
    assert (result.plan.learning_rate, result.plan.learning_rate_rule) == (found.best, "tuned")
    assert result.plan.learning_rate_factor == pytest.approx(found.best / 0.005)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["learning_rate"] == found.best
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["tuning"]["learning_rate"]["best"] == found.best
    assert stored["plan"]["learning_rate_rule"] == "tuned"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "6 learning rates tried in runs of 24 steps" in page
    assert "6 runs of 24 optimizer steps at this batch" in page
