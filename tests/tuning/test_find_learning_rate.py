"""The learning rate: what short runs find, against a grid in NumPy, and what becomes of what goes wrong."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import autobatch
from autobatch import api as fitting
from autobatch import api as rating
from autobatch.api import RunContext
from autobatch.cli.failures import Terminated
from autobatch.core.errors import InputError
from autobatch.core.options import TuneOptions, options_from
from autobatch.core.progress import Progress
from autobatch.core.records import LrComparison, LrTuning
from autobatch.device.cpu import CpuDevice
from autobatch.planning import make_plan
from autobatch.probing.attempt import TrainSetup
from autobatch.tuning.find_fastest import Budget, StudyLocation
from autobatch.tuning.find_learning_rate import MINIMUM_GAIN, decide, find_learning_rate, gain_over
from autobatch.tuning.lr_trial import (
    PARTS,
    REACH,
    LocalRuns,
    LrTrialResult,
    LrTrialSpec,
    StepLoss,
    open_runs,
    parts_of,
    short_run,
)
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler
from tests.support.commandline import SMALL, environment
from tests.support.training import Rows, make_workload
from tests.support.untouched import fingerprint, with_gradients

STEPS = 24
FEATURES = 6
SAMPLES = 32


def table(seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs of very different scales, so that the best learning rate is a compromise; and targets."""
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((SAMPLES, FEATURES)) * np.array([2.0, 1.5, 1.0, 0.7, 0.5, 0.3])
    return inputs, inputs @ draw.standard_normal(FEATURES) + 0.1 * draw.standard_normal(SAMPLES)


def descend(rate: float) -> float:
    """Mean loss over the last quarter of a descent on the whole table, by hand."""
    inputs, targets = table()
    weights = np.zeros(FEATURES)
    losses = []
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(STEPS):
            prediction_errors = inputs @ weights - targets
            losses.append(float(np.mean(prediction_errors**2)))
            weights = weights - rate * 2 / SAMPLES * inputs.T @ prediction_errors
        return float(np.mean(losses[-STEPS // 4 :]))


def grid(default: float) -> tuple[float, float]:
    """The best learning rate that may be tried, of two thousand, and its loss."""
    rates = default * np.geomspace(1 / REACH, REACH, 2001)
    losses = np.array([descend(float(rate)) for rate in rates])
    best = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    return float(rates[best]), float(losses[best])


class Linear(nn.Module):
    """Weights that begin at nothing; some noise on request, and a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return x @ self.weights


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def workload(**fields: Any) -> Workload:
    data = Rows(*(torch.from_numpy(column) for column in table()))
    return make_workload(**{"model": Linear, "train_data": data, "loss": squares, **fields})


def setup(**fields: Any) -> TrainSetup:
    mine = workload(**fields)
    return TrainSetup(
        workload=mine,
        model=mine.model(),
        device=CpuDevice(memory_budget="1GiB"),
        worst_case=WorstCaseSampler(mine),
        precision="fp32",
    )


def task_of(default: float, *, target_batch: int = SAMPLES, steps: int = STEPS) -> LrTrialSpec:
    return LrTrialSpec(default, target_batch, 12, "fp32", {}, steps)


def tuned(
    made: TrainSetup | None = None,
    *,
    default: float = 0.01,
    trials: int = 12,
    seed: int = 0,
    storage: str | None = None,
    task: LrTrialSpec | None = None,
    runs: Any = None,
    made_for: dict[str, Any] | None = None,
    **more: Any,
) -> LrTuning:
    task = task or task_of(default)
    return find_learning_rate(
        runs or LocalRuns(made or setup(), task),
        task,
        budget=Budget(trials, more.pop("expired", lambda: False)),
        seed=seed,
        place=StudyLocation("study-learning-rate", storage, made_for or {"model": "m"}),
        **more,
    )


def journal(path: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name="study-learning-rate", storage=storage).trials


class Curves:
    """Runs whose losses are a function of the learning rate, the seed and the step."""

    def __init__(self, loss: Callable[[float, int, int], float]) -> None:
        self.loss = loss
        self.begun: list[tuple[float, int]] = []

    def losses(self, rate: float, seed: int) -> Iterator[StepLoss]:
        self.begun.append((rate, seed))
        for step in range(STEPS):
            yield StepLoss(self.loss(rate, seed, step), 1.0)


@pytest.mark.parametrize(("seed", "default"), [(0, 0.01), (1, 0.4)])
def test_it_finds_about_what_a_grid_finds(seed: int, default: float) -> None:
    _, least = grid(default)
    found = tuned(default=default, seed=seed)
    fall = descend(0.0) - least
    assert found.best_loss is not None
    assert found.best_loss <= least + 0.01 * fall
    assert found.best_loss == pytest.approx(descend(found.best), rel=1e-9)
    assert found.best != default
    assert found.trials == 12
    assert found.history[0].learning_rate == default
    assert all(default / REACH <= one.learning_rate <= default * REACH for one in found.history)


def test_a_default_at_the_optimum_is_kept() -> None:
    best, _ = grid(0.05)
    found = tuned(default=best)
    assert (found.best, found.best_loss) == (best, found.default_loss)
    assert found.default_loss == pytest.approx(descend(best), rel=1e-9)
    assert len(found.notes) == 1
    assert "default" in found.notes[0]


def test_what_diverges_is_complete_and_infeasible_and_never_the_best(tmp_path: Path) -> None:
    found = tuned(default=0.1, storage=str(tmp_path / "s.log"))
    refused = [one for one in found.history if not one.feasible]
    assert refused
    assert math.isfinite(descend(found.best))
    trials = journal(tmp_path / "s.log")
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    for trial, row in zip(trials, found.history, strict=True):
        assert (max(trial.constraints.values()) <= 0) is row.feasible
        if descend(row.learning_rate) > 2 * descend(0.0):
            assert not row.feasible
    worst = max(trial.value for trial, row in zip(trials, found.history, strict=True) if row.feasible)
    assert all(trial.value <= worst for trial in trials)


def test_a_default_that_diverges_makes_room_for_one_that_trains() -> None:
    default = 3.0
    assert descend(default) > 2 * descend(0.0)
    found = tuned(default=default)
    assert found.best < default
    assert descend(found.best) < 0.1 * descend(0.0)
    assert [pair.gain for pair in found.pairs] == [1.0] * 3


def test_losses_that_are_not_finite_are_told() -> None:
    found = tuned(runs=Curves(lambda rate, seed, step: math.inf if rate > 0.01 else 1.0))
    notes = {one.note for one in found.history if one.learning_rate > 0.01}
    assert notes == {"no loss was finite"}
    assert found.best == 0.01


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        return squares(model, batch) + 0 * (model.weights - model.weights.detach()).abs().sqrt().sum()  # type: ignore[operator, union-attr]

    seen = list(short_run(setup(loss=spoiled), task_of(0.01), 0.01, 0))
    assert [one.failure for one in seen] == ["its loss or gradient is not finite"]
    skipping = task_of(0.01)._replace(skips=True)
    assert [one.failure for one in short_run(setup(loss=spoiled), skipping, 0.01, 0)] == [None] * STEPS


def test_none_that_trains_leaves_the_default() -> None:
    found = tuned(runs=Curves(lambda *_: math.nan), trials=4)
    assert (found.best, found.best_loss, found.trials) == (0.01, None, 4)
    assert found.notes == [
        "kept learning rate 0.01: none of 4 learning rates trained. The default one: no loss was finite"
    ]


def test_short_runs_leave_nothing_behind() -> None:
    made = setup()
    with_gradients(made.model)
    before = fingerprint(made.model)
    assert tuned(made, trials=8).best != 0.01
    assert fingerprint(made.model) == before
    ended = short_run(made, task_of(0.01), 0.01, 0)
    next(ended)
    ended.close()
    assert fingerprint(made.model) == before


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return squares(model, batch) * (1 + 0.1 * torch.rand(()))


WHOLE = WholeBatchLoss(
    represent=lambda model, batch: (model(batch[0]), batch[1]),
    loss=lambda model, rows: ((rows[0] - rows[1]) ** 2).mean() + rows[0].var(),
)


@pytest.mark.parametrize("loss", [noisy, WHOLE], ids=["mean", "whole"])
def test_a_short_run_trains_what_fit_trains(loss: Any, tmp_path: Path) -> None:
    """The same weights, windows and draws, so the same losses bit for bit."""
    autobatch.fit(
        workload(loss=loss), target_batch=12, max_micro_batch=5, steps=8, trials=0, seed=3, device="cpu",
        out=tmp_path / "run",
    )  # fmt: skip
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    task = task_of(0.1, target_batch=12, steps=8)._replace(micro_batch=4)
    seen = [one.loss for one in short_run(setup(loss=loss), task, 0.1, 3)]
    assert seen == [json.loads(line)["loss"] for line in lines]


def test_parts_are_means_over_what_was_counted() -> None:
    windows = [
        StepLoss(8.0, 1),
        StepLoss(2.0, 3),
        StepLoss(math.nan, 0),
        StepLoss(4.0, 2),
        StepLoss(1.0, 1),
        StepLoss(3.0, 1),
    ]
    found = list(parts_of(windows, 6))
    assert [part.loss for part in found] == [8.0, 2.0, 4.0, 2.0]
    assert {part.first for part in found} == {8.0}
    failed = list(parts_of([StepLoss(8.0, 1), StepLoss(math.nan, 0, "gone")], 4))
    assert [(part.loss, part.failure) for part in failed] == [(8.0, None), (None, "gone")]


def test_what_the_pruner_ends_is_never_the_best(tmp_path: Path) -> None:
    """Far above the default it looks hopeless for three quarters of the run, and is perfect in the last."""

    def loss(rate: float, seed: int, step: int) -> float:
        if rate > 0.02:
            return 5.0 + rate if step < 18 else 0.0
        return 4.0 - step * rate * 10

    curves = Curves(loss)
    found = tuned(runs=curves, trials=14, storage=str(tmp_path / "s.log"))
    ended = [one for one in found.history if (one.note or "").startswith("stopped after")]
    assert ended
    assert not any(one.feasible for one in ended)
    assert found.best not in {one.learning_rate for one in ended}
    assert {trial.state for trial in journal(tmp_path / "s.log")} == {TrialState.COMPLETE}


def test_the_best_is_held_against_the_default_on_other_data() -> None:
    """What is better on the trials' own data alone is luck."""
    curves = Curves(lambda rate, seed, step: 2.0 - step / STEPS * (1 + (seed == 0) * (rate > 0.02)))
    found = tuned(runs=curves)
    assert found.best == 0.01
    assert "within noise" in found.notes[0]
    assert [pair.seed for pair in found.pairs] == [0, 1, 2]
    others = [(rate == 0.01, seed) for rate, seed in curves.begun if seed]
    assert others == [(True, 1), (False, 1), (False, 2), (True, 2)]


@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ((0.3, 0.31, 0.29), True),
        ((1.0, 1.0, 1.0), True),
        ((0.3, 0.31, -0.01), False),
        ((0.5, 0.02, 0.01), False),
        ((MINIMUM_GAIN / 2,) * 3, False),
        ((0.3,), False),
        ((), False),
    ],
)
def test_only_what_is_beyond_the_noise_replaces_the_default(gains: tuple[float, ...], better: bool) -> None:
    pairs = [LrComparison(seed=0, default_loss=1.0, other_loss=1.0, gain=gain) for gain in gains]
    assert decide(pairs) is better


def test_a_gain_is_a_share_of_the_fall_whatever_the_scale_of_the_loss() -> None:
    for scale, shift in ((1.0, 0.0), (100.0, -500.0)):
        default, other = (
            LrTrialResult(0.1, scale * loss + shift, scale * 4 + shift, None) for loss in (2.0, 1.0)
        )
        assert gain_over(default, other) == pytest.approx(1 / 3)
        assert gain_over(other, default) == pytest.approx(-0.5)
    gone = LrTrialResult(0.1, None, None, "it diverged")
    assert (gain_over(gone, other), gain_over(other, gone)) == (1.0, -1.0)


def test_the_same_seed_gives_the_same_answer_and_another_asks_differently() -> None:
    def answer(seed: int) -> tuple[Any, ...]:
        found = tuned(seed=seed, trials=6)
        return found.best, found.history, found.pairs

    assert answer(5) == answer(5)
    assert answer(5)[1] != answer(6)[1]


def test_a_learning_rate_that_comes_again_is_not_run_again(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    curves = Curves(lambda rate, seed, step: 5.0 - step * rate)
    first = tuned(runs=curves, trials=2, storage=storage)
    backend = optuna.storages.journal.JournalFileBackend(storage)
    study = optuna.load_study(
        study_name="study-learning-rate", storage=optuna.storages.JournalStorage(backend)
    )
    study.ask(), study.ask(), study.ask()  # what is in line
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial({"learning_rate": 0.01})
    curves.begun.clear()
    found = tuned(runs=curves, trials=3, storage=storage)
    assert found.history == [*first.history, msgspec.structs.replace(first.history[0], number=2)]
    assert 0 not in [seed for _, seed in curves.begun]


def test_the_best_at_the_end_of_what_was_tried_is_said() -> None:
    found = tuned(runs=Curves(lambda rate, seed, step: 5.0 - step / STEPS * math.log(rate / 1e-4)), trials=16)
    assert found.best > 0.01 * REACH / 2
    assert "at the edge of the tried range" in found.notes[0]


def test_no_trial_starts_when_the_time_is_over() -> None:
    found = tuned(expired=lambda: True)
    assert (found.trials, found.best) == (0, 0.01)
    assert found.notes == ["kept learning rate 0.01: its own trial was not run"]


KILLED = """
import os, signal, sys
from autobatch.tuning.find_learning_rate import find_learning_rate
from autobatch.tuning.lr_trial import LrTrialSpec, StepLoss
from autobatch.tuning.find_fastest import Budget, StudyLocation

begun = 0

class Runs:
    def losses(self, rate, seed):
        global begun
        begun += 1
        for step in range(8):
            if begun == 4 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield StepLoss(5.0 - step * rate, 1.0)

task = LrTrialSpec(0.01, 8, 8, "fp32", {}, 8)
place = StudyLocation("study-learning-rate", sys.argv[1], {"model": "m"})
find_learning_rate(Runs(), task, budget=Budget(6), seed=0, place=place)
"""


def test_a_study_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    words = [sys.executable, "-c", KILLED, str(path)]
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = [trial.params for trial in journal(path) if trial.state is TrialState.COMPLETE]
    assert len(before) == 3
    curves = Curves(lambda rate, seed, step: 5.0 - step * rate)
    found = tuned(runs=curves, trials=6, storage=str(path), task=task_of(0.01, steps=8))
    assert found.trials == 6
    assert [one.learning_rate for one in found.history[:3]] == [one["learning_rate"] for one in before]
    assert not {one["learning_rate"] for one in before} & {rate for rate, seed in curves.begun if not seed}
    assert [trial.state for trial in journal(path)].count(TrialState.FAIL) == 1


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    curves, storage = Curves(lambda *_: 1.0), str(tmp_path / "s.log")
    tuned(runs=curves, trials=1, storage=storage, made_for={"model": "a"})
    with pytest.raises(InputError, match=r"made for something else: model is 'b' here and 'a' there"):
        tuned(runs=curves, trials=1, storage=storage, made_for={"model": "b"})


def test_an_error_is_the_workload_s_at_the_default_and_the_rate_s_elsewhere() -> None:
    def brittle(limit: float) -> Callable[..., torch.optim.Optimizer]:
        def make(params: Any, learning_rate: float) -> torch.optim.Optimizer:
            if learning_rate >= limit:
                raise ValueError(f"{limit} is too much")
            return torch.optim.SGD(params, lr=learning_rate)

        return make

    found = tuned(setup(optimizer=brittle(0.02)))
    notes = {one.note for one in found.history if one.learning_rate >= 0.02}
    assert notes == {"ValueError: 0.02 is too much"}
    with pytest.raises(ValueError, match="too much"):
        tuned(setup(optimizer=brittle(0.001)))


CRASHES = """
import ctypes
def crashing(params, learning_rate):
    if learning_rate > 0.015:
        ctypes.string_at(0)
    return torch.optim.SGD(params, lr=learning_rate)
def workload():
    return small(optimizer=crashing)
"""


@pytest.mark.slow
def test_a_run_that_crashes_its_process_is_infeasible_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{CRASHES}\n")
    options = options_from(TuneOptions, {"target_batch": 32, "device": "cpu", "memory_budget": "64MiB"})
    task = LrTrialSpec(0.01, 32, 8, "fp32", {}, 4)
    with open_runs(f"{path}:workload", options, task, setup=setup, isolated=True) as runs:
        first = list(runs.losses(0.01, 0))
        assert len(first) == 4
        (lost,) = parts_of(runs.losses(0.02, 0), 4)
        assert "(SIGSEGV)" in (lost.failure or "")
        half = runs.losses(0.005, 0)
        next(half)
        half.close()
        assert list(runs.losses(0.01, 0)) == first


def options(**more: Any) -> TuneOptions:
    fields = {"target_batch": 32, "device": "cpu", "trials": 1, "knobs": "", "tune_lr": True, **more}
    return options_from(TuneOptions, {name: value for name, value in fields.items() if value != ""})


def test_an_interrupt_keeps_the_default_and_what_was_found_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def interrupted(*given: Any) -> Iterator[StepLoss]:
        calls.append(given)
        raise KeyboardInterrupt
        yield

    notes: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "note", notes.append, raising=False)
    monkeypatch.setattr(LocalRuns, "losses", interrupted)
    storage = str(tmp_path / "s.log")
    asked = options(storage=storage, study="study")
    result = rating.run_tune_command(workload(), asked, RunContext(progress=progress))
    assert calls
    assert result.plan is not None
    assert result.tuning is not None
    assert (result.plan.learning_rate, result.tuning.trials, result.tuning.learning_rate) == (0.1, 1, None)
    assert notes[-1] == "interrupted: the learning rate stays as it was"
    assert journal(tmp_path / "s.log")[0].state is TrialState.FAIL


def test_who_asks_for_the_end_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*given: Any) -> Iterator[StepLoss]:
        raise Terminated
        yield

    monkeypatch.setattr(LocalRuns, "losses", terminated)
    with pytest.raises(Terminated):
        rating.run_tune_command(workload(), options(), RunContext())


def test_fit_trains_with_what_was_found_and_says_so(tmp_path: Path) -> None:
    result = autobatch.fit(
        workload(learning_rate=0.005), target_batch=SAMPLES, device="cpu", trials=0, tune_lr=True,
        lr_trials=6, lr_steps=STEPS, steps=3, out=tmp_path / "run",
    )  # fmt: skip
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
    assert "Loss by learning rate" in page
    assert "6 runs of 24 optimizer steps at this batch" in page


def test_a_run_that_goes_on_elsewhere_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"target_batch": SAMPLES, "device": "cpu", "trials": 0, "tune_lr": True, "lr_steps": STEPS}
    options |= {"lr_trials": 3, "steps": 2, "out": tmp_path / "run"}
    first = autobatch.fit(workload(learning_rate=0.01), **options).plan
    monkeypatch.setattr(fitting, "changes_since_checkpoint", lambda *_: ["device"])
    again = autobatch.fit(workload(learning_rate=0.01), **{**options, "steps": 4, "resume": True}).plan
    assert first is not None
    assert again is not None
    assert first.learning_rate != 0.01
    assert (again.learning_rate, again.learning_rate_rule) == (first.learning_rate, "tuned")
    assert again.learning_rate_source == first.learning_rate_source


def test_a_plan_whose_learning_rate_stays_is_the_same_plan() -> None:
    plan = make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1)
    stays = LrTuning(trials=1, steps=4, default=0.1, best=0.1, default_loss=1.0, best_loss=1.0, study="s")
    assert rating.with_rate(plan, stays, declared=0.1) is plan


def test_a_run_is_at_least_as_many_steps_as_it_has_parts() -> None:
    with pytest.raises(InputError, match="lr_steps must be a whole number of 4 or more, found 3"):
        options(lr_steps=3)
    assert PARTS == 4
