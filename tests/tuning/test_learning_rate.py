"""The search for a learning rate, against a gradient descent by hand in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autobatch.core.errors import Infeasible
from autobatch.core.records import LrTuning, Plan
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.tuning import learning_rate
from autobatch.tuning.fastest import Tuner
from autobatch.tuning.learning_rate import ORDERS, REACH, short_run, tune_learning_rate
from tests.support.options import as_options
from tests.support.probes import Listener
from tests.support.training import make_setup
from tests.support.trials import FEATURES, SAMPLES, STEPS, linear_workload, squares, table
from tests.support.untouched import fingerprint, with_gradients


def plan_at(rate: float) -> Plan:
    return make_plan(target_batch=SAMPLES, micro_batch_limit=12, learning_rate=rate)


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LrTuning]:
    """Return a function that tunes the learning rate of the linear model."""
    monkeypatch.setattr(learning_rate, "STEPS", STEPS)

    def found(default: float, made: Any = None, *, run: Any = short_run, **fields: Any) -> LrTuning:
        monkeypatch.setattr(learning_rate, "short_run", run)
        process = ThisProcess(made or make_setup(linear_workload(**fields)))
        options, progress = as_options("tune", target_batch=SAMPLES), Listener()
        tuner = Tuner(process=process, options=options, planned_steps=100, home=tmp_path, progress=progress)
        plan, tuning = tune_learning_rate(tuner, plan_at(default))
        assert plan.learning_rate == tuning.best
        assert (plan.learning_rate_rule == "tuned") is (tuning.best != default)
        return tuning

    return found


def descend(rate: float) -> float:
    """Return the mean loss over the last quarter of a gradient descent on the whole table."""
    inputs, targets = table()
    weights, losses = np.zeros(FEATURES), []
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(STEPS):
            errors = inputs @ weights - targets
            losses.append(float(np.mean(errors**2)))
            weights = weights - rate * 2 / SAMPLES * inputs.T @ errors
        return float(np.mean(losses[-STEPS // 4 :]))


def grid(default: float) -> tuple[float, float]:
    """Return the best of five hundred learning rates within reach, and its loss."""
    rates = default * np.geomspace(1 / REACH, REACH, 501)
    losses = np.array([descend(float(rate)) for rate in rates])
    best = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    return float(rates[best]), float(losses[best])


def test_the_best_is_close_to_that_of_a_grid_and_the_study_is_kept(find) -> None:
    default, made = 0.01, make_setup(linear_workload())
    with_gradients(made.model)
    before = fingerprint(made.model)
    found = find(default, made)
    fall = descend(0.0) - grid(default)[1]
    assert found.best_loss == pytest.approx(descend(found.best), rel=1e-9)
    assert found.best_loss <= grid(default)[1] + 0.02 * fall
    assert fingerprint(made.model) == before
    assert (found.trials, found.history[0].learning_rate) == (10, default)
    assert find(default).history == found.history


def test_a_default_at_the_optimum_is_kept_and_one_that_diverges_is_not(find) -> None:
    best, _ = grid(0.05)
    found = find(best)
    assert (found.best, found.best_loss, found.notes) == (best, found.default_loss, [])
    assert descend(find(3.0).best) < 0.1 * descend(0.0)


@pytest.mark.parametrize("wins", [0, 4, 5])
def test_the_best_must_be_better_on_every_other_data_order(wins: int, find) -> None:
    """What is better on the trials' own data alone is luck."""

    def run(_: Any, plan: Plan, seed: int, steps: int) -> float:
        return 2.0 - (0.02 < plan.learning_rate < 0.1 and seed <= wins)

    found = find(0.01, run=run)
    assert (found.best == 0.01) is bool(found.notes) is (wins < len(ORDERS))


def test_an_error_is_raised_at_the_default_and_makes_other_learning_rates_infeasible(find) -> None:
    def brittle(limit: float) -> Callable[..., torch.optim.Optimizer]:
        def make(params: Any, learning_rate: float) -> torch.optim.Optimizer:
            if learning_rate >= limit:
                raise ValueError(f"{limit} is too much")
            return torch.optim.SGD(params, lr=learning_rate)

        return make

    found = find(0.01, optimizer=brittle(0.02))
    notes = {trial.note for trial in found.history if trial.learning_rate >= 0.02}
    assert notes == {"ValueError: 0.02 is too much"}
    with pytest.raises(ValueError, match="too much"):
        find(0.01, optimizer=brittle(0.001))


def test_a_run_that_does_not_train_is_infeasible() -> None:
    def spoiled(model: Any, batch: Any) -> torch.Tensor:
        return squares(model, batch) * math.nan

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    for loss, reason in ((spoiled, "not finite"), (full, "Tried to allocate")):
        with pytest.raises(Infeasible, match=reason):
            short_run(make_setup(linear_workload(loss=loss)), plan_at(0.01), 0, STEPS)
