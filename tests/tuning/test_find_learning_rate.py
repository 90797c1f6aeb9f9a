"""The search for a learning rate, against a grid in NumPy."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
import torch
from optuna.trial import TrialState

from autobatch.core.errors import InputError
from autobatch.tuning.lr_trial import REACH
from tests.support.commandline import environment
from tests.support.short_runs import (
    STEPS,
    Curves,
    descend,
    find_rate,
    grid,
    linear_setup,
    stored_trials,
    task_of,
)


@pytest.mark.parametrize(("seed", "default"), [(0, 0.01), (1, 0.4)])
def test_the_best_is_close_to_that_of_a_grid(seed: int, default: float) -> None:
    _, least = grid(default)
    found = find_rate(default=default, seed=seed)
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
    found = find_rate(default=best)
    assert (found.best, found.best_loss) == (best, found.default_loss)
    assert found.default_loss == pytest.approx(descend(best), rel=1e-9)
    assert len(found.notes) == 1
    assert "default" in found.notes[0]


def test_a_diverging_run_is_complete_infeasible_and_never_the_best(tmp_path: Path) -> None:
    found = find_rate(default=0.1, storage=str(tmp_path / "s.log"))
    refused = [one for one in found.history if not one.feasible]
    assert refused
    assert math.isfinite(descend(found.best))
    trials = stored_trials(tmp_path / "s.log")
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    for trial, row in zip(trials, found.history, strict=True):
        assert (max(trial.constraints.values()) <= 0) is row.feasible
        if descend(row.learning_rate) > 2 * descend(0.0):
            assert not row.feasible
    worst = max(trial.value for trial, row in zip(trials, found.history, strict=True) if row.feasible)
    assert all(trial.value <= worst for trial in trials)


def test_a_diverging_default_is_replaced_by_one_that_trains() -> None:
    default = 3.0
    assert descend(default) > 2 * descend(0.0)
    found = find_rate(default=default)
    assert found.best < default
    assert descend(found.best) < 0.1 * descend(0.0)
    assert [pair.gain for pair in found.pairs] == [1.0] * 3


def test_non_finite_losses_are_noted() -> None:
    found = find_rate(runs=Curves(lambda rate, seed, step: math.inf if rate > 0.01 else 1.0))
    notes = {one.note for one in found.history if one.learning_rate > 0.01}
    assert notes == {"no loss was finite"}
    assert found.best == 0.01


def test_the_default_is_kept_if_no_learning_rate_trains() -> None:
    found = find_rate(runs=Curves(lambda *_: math.nan), trials=4)
    assert (found.best, found.best_loss, found.trials) == (0.01, None, 4)
    assert found.notes == [
        "kept learning rate 0.01: none of 4 learning rates trained. The default one: no loss was finite"
    ]


def test_a_stopped_run_is_never_the_best(tmp_path: Path) -> None:
    """Far above the default it looks hopeless for three quarters of the run, and is perfect in the last."""

    def loss(rate: float, seed: int, step: int) -> float:
        if rate > 0.02:
            return 5.0 + rate if step < 18 else 0.0
        return 4.0 - step * rate * 10

    curves = Curves(loss)
    found = find_rate(runs=curves, trials=14, storage=str(tmp_path / "s.log"))
    ended = [one for one in found.history if (one.note or "").startswith("stopped after")]
    assert ended
    assert not any(one.feasible for one in ended)
    assert found.best not in {one.learning_rate for one in ended}
    assert {trial.state for trial in stored_trials(tmp_path / "s.log")} == {TrialState.COMPLETE}


def test_the_best_is_compared_with_the_default_on_other_data() -> None:
    """What is better on the trials' own data alone is luck."""
    curves = Curves(lambda rate, seed, step: 2.0 - step / STEPS * (1 + (seed == 0) * (rate > 0.02)))
    found = find_rate(runs=curves)
    assert found.best == 0.01
    assert "within noise" in found.notes[0]
    assert [pair.seed for pair in found.pairs] == [0, 1, 2]
    others = [(rate == 0.01, seed) for rate, seed in curves.begun if seed]
    assert others == [(True, 1), (False, 1), (False, 2), (True, 2)]


def test_the_same_seed_gives_the_same_answer_and_another_seed_other_trials() -> None:
    def answer(seed: int) -> tuple[Any, ...]:
        found = find_rate(seed=seed, trials=6)
        return found.best, found.history, found.pairs

    assert answer(5) == answer(5)
    assert answer(5)[1] != answer(6)[1]


def test_a_repeated_learning_rate_is_not_run_again(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    curves = Curves(lambda rate, seed, step: 5.0 - step * rate)
    first = find_rate(runs=curves, trials=2, storage=storage)
    backend = optuna.storages.journal.JournalFileBackend(storage)
    study = optuna.load_study(
        study_name="study-learning-rate", storage=optuna.storages.JournalStorage(backend)
    )
    study.ask(), study.ask(), study.ask()  # what is in line
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial({"learning_rate": 0.01})
    curves.begun.clear()
    found = find_rate(runs=curves, trials=3, storage=storage)
    assert found.history == [*first.history, msgspec.structs.replace(first.history[0], number=2)]
    assert 0 not in [seed for _, seed in curves.begun]


def test_a_best_at_the_edge_of_the_range_is_noted() -> None:
    found = find_rate(
        runs=Curves(lambda rate, seed, step: 5.0 - step / STEPS * math.log(rate / 1e-4)), trials=16
    )
    assert found.best > 0.01 * REACH / 2
    assert "at the edge of the tried range" in found.notes[0]


def test_no_trial_starts_after_the_time_limit() -> None:
    found = find_rate(expired=lambda: True)
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


def test_a_study_resumes_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    words = [sys.executable, "-c", KILLED, str(path)]
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = [trial.params for trial in stored_trials(path) if trial.state is TrialState.COMPLETE]
    assert len(before) == 3
    curves = Curves(lambda rate, seed, step: 5.0 - step * rate)
    found = find_rate(runs=curves, trials=6, storage=str(path), task=task_of(0.01, steps=8))
    assert found.trials == 6
    assert [one.learning_rate for one in found.history[:3]] == [one["learning_rate"] for one in before]
    assert not {one["learning_rate"] for one in before} & {rate for rate, seed in curves.begun if not seed}
    assert [trial.state for trial in stored_trials(path)].count(TrialState.FAIL) == 1


def test_a_study_made_for_something_else_is_rejected(tmp_path: Path) -> None:
    curves, storage = Curves(lambda *_: 1.0), str(tmp_path / "s.log")
    find_rate(runs=curves, trials=1, storage=storage, made_for={"model": "a"})
    with pytest.raises(InputError, match=r"made for something else: model is 'b' here and 'a' there"):
        find_rate(runs=curves, trials=1, storage=storage, made_for={"model": "b"})


def test_an_error_is_raised_at_the_default_and_makes_other_learning_rates_infeasible() -> None:
    def brittle(limit: float) -> Callable[..., torch.optim.Optimizer]:
        def make(params: Any, learning_rate: float) -> torch.optim.Optimizer:
            if learning_rate >= limit:
                raise ValueError(f"{limit} is too much")
            return torch.optim.SGD(params, lr=learning_rate)

        return make

    found = find_rate(linear_setup(optimizer=brittle(0.02)))
    notes = {one.note for one in found.history if one.learning_rate >= 0.02}
    assert notes == {"ValueError: 0.02 is too much"}
    with pytest.raises(ValueError, match="too much"):
        find_rate(linear_setup(optimizer=brittle(0.001)))
