"""The search for a learning rate, against a gradient descent by hand in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from autobatch.core.records import LrTuning
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.tuning.configuration import Budget, StudyLocation
from autobatch.tuning.learning_rate import (
    REACH,
    LrTrialResult,
    LrTrialSpec,
    ShortRuns,
    find_learning_rate,
    result_of,
)
from tests.support.training import make_setup
from tests.support.trials import FEATURES, SAMPLES, STEPS, linear_workload, open_journal, squares, table
from tests.support.untouched import fingerprint, with_gradients


def runs_of(default: float = 0.01, made: Any = None, **fields: Any) -> ShortRuns:
    """Return short runs of the linear model; ``fields`` change its workload."""
    plan = make_plan(target_batch=SAMPLES, micro_batch_limit=12, learning_rate=default)
    process = ThisProcess(made or make_setup(linear_workload(**fields)))
    return ShortRuns(process, LrTrialSpec(plan, STEPS))


def find_rate(run: Any, *, trials: int = 12, storage: Path | None = None) -> LrTuning:
    place = StudyLocation("study", None if storage is None else str(storage), {"model": "m"})
    return find_learning_rate(run, budget=Budget(trials), seed=0, place=place)


class Curves:
    """Runs whose losses are a function of the learning rate, the seed and the step."""

    def __init__(self, loss: Callable[[float, int, int], float]) -> None:
        plan = make_plan(target_batch=SAMPLES, micro_batch_limit=12, learning_rate=0.01)
        self.task = LrTrialSpec(plan, STEPS)
        self.loss = loss
        self.begun: list[tuple[float, int]] = []

    def __call__(self, rate: float, seed: int) -> LrTrialResult:
        self.begun.append((rate, seed))
        return result_of(rate, [(self.loss(rate, seed, step), 1.0) for step in range(STEPS)])


def descend(rate: float) -> float:
    """Return the mean loss over the last quarter of a gradient descent on the whole table."""
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
    """Return the best of five hundred learning rates within reach, and its loss."""
    rates = default * np.geomspace(1 / REACH, REACH, 501)
    losses = np.array([descend(float(rate)) for rate in rates])
    best = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    return float(rates[best]), float(losses[best])


def test_the_best_is_close_to_that_of_a_grid(tmp_path: Path) -> None:
    default, storage = 0.01, tmp_path / "s.log"
    _, least = grid(default)
    first = find_rate(runs_of(default), trials=4, storage=storage)
    found = find_rate(runs_of(default), storage=storage)
    fall = descend(0.0) - least
    assert found.best_loss is not None
    assert found.best_loss <= least + 0.01 * fall
    assert found.best_loss == pytest.approx(descend(found.best), rel=1e-9)
    assert found.best != default
    assert (found.trials, found.history[:4]) == (12, first.history)
    assert found.history[0].learning_rate == default
    assert all(default / REACH <= one.learning_rate <= default * REACH for one in found.history)


def test_a_default_at_the_optimum_is_kept() -> None:
    best, _ = grid(0.05)
    found = find_rate(runs_of(best))
    assert (found.best, found.best_loss) == (best, found.default_loss)
    assert found.default_loss == pytest.approx(descend(best), rel=1e-9)
    assert len(found.notes) == 1
    assert "default" in found.notes[0]


def test_a_diverging_run_is_complete_infeasible_and_never_the_best(tmp_path: Path) -> None:
    default, made = 3.0, make_setup(linear_workload())
    with_gradients(made.model)
    before = fingerprint(made.model)
    found = find_rate(runs_of(default, made), storage=tmp_path / "s.log")
    assert fingerprint(made.model) == before
    assert descend(default) > 2 * descend(0.0)
    assert found.best < default
    assert descend(found.best) < 0.1 * descend(0.0)
    assert [pair.gain for pair in found.pairs] == [1.0] * 3
    trials = open_journal(tmp_path / "s.log", "study").trials
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    for trial, row in zip(trials, found.history, strict=True):
        assert (trial.user_attrs["failure"] is None) is row.feasible
        if not descend(row.learning_rate) <= 2 * descend(0.0):
            assert not row.feasible
    worst = max(trial.value for trial, row in zip(trials, found.history, strict=True) if row.feasible)
    assert all(trial.value <= max(worst, trials[0].value) for trial in trials)


def test_the_best_is_compared_with_the_default_on_other_data() -> None:
    """What is better on the trials' own data alone is luck."""
    curves = Curves(lambda rate, seed, step: 2.0 - step / STEPS * (1 + (seed == 0) * (rate > 0.02)))
    found = find_rate(curves)
    assert found.best == 0.01
    assert "within noise" in found.notes[0]
    assert [pair.seed for pair in found.pairs] == [0, 1, 2]
    others = [(rate == 0.01, seed) for rate, seed in curves.begun if seed]
    assert others == [(True, 1), (False, 1), (False, 2), (True, 2)]


@pytest.mark.parametrize(
    ("loss", "trials", "best", "note"),
    [
        (lambda *_: math.nan, 4, 0.01, "none of 4 learning rates trained. The default one: no loss"),
        (lambda rate, *_: math.inf if rate > 0.01 else 1.0, 6, 0.01, "no other one reached a lower loss"),
        (lambda *_: 1.0, 0, 0.01, "its own trial was not run"),
        (
            lambda rate, _, step: 5.0 - step / STEPS * math.log(rate / 1e-4),
            16,
            None,
            "edge of the tried range",
        ),
    ],
)
def test_the_answer_is_explained(loss, trials: int, best: float | None, note: str) -> None:
    found = find_rate(Curves(loss), trials=trials)
    assert note in found.notes[0]
    assert found.trials == trials
    assert found.best == best if best is not None else found.best > 0.01 * REACH / 2


def test_an_error_is_raised_at_the_default_and_makes_other_learning_rates_infeasible() -> None:
    def brittle(limit: float) -> Callable[..., torch.optim.Optimizer]:
        def make(params: Any, learning_rate: float) -> torch.optim.Optimizer:
            if learning_rate >= limit:
                raise ValueError(f"{limit} is too much")
            return torch.optim.SGD(params, lr=learning_rate)

        return make

    found = find_rate(runs_of(optimizer=brittle(0.02)), trials=6)
    notes = {one.note for one in found.history if one.learning_rate >= 0.02}
    assert notes == {"ValueError: 0.02 is too much"}
    with pytest.raises(ValueError, match="too much"):
        find_rate(runs_of(optimizer=brittle(0.001)))


@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ((0.3, 0.31, 0.29), True),
        ((0.3, 0.31, -0.01), False),
        ((0.5, 0.02, 0.01), False),
        ((0.01, 0.01, 0.01), False),
    ],
)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (100.0, -500.0)])
def test_only_a_gain_beyond_the_noise_replaces_the_default(
    gains: tuple[float, ...], better: bool, scale: float, shift: float
) -> None:
    """A gain is a share of the loss reduction, so neither the scale nor the zero of the loss counts."""

    def loss(rate: float, seed: int, step: int) -> float:
        fall = 0.0 if rate == 0.01 else gains[seed] / (1 - gains[seed])
        return scale * (4.0 - (step > 0) * (1 + fall if rate <= 0.04 else 0.5)) + shift

    found = find_rate(Curves(loss), trials=5)
    assert (found.best != 0.01) is better
    assert [pair.gain for pair in found.pairs] == pytest.approx(gains)


def test_a_non_finite_gradient_and_memory_that_runs_out_end_the_run() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        return squares(model, batch) + 0 * (model.weights - model.weights.detach()).abs().sqrt().sum()  # type: ignore[operator, union-attr]

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    runs = runs_of(loss=spoiled)
    assert runs(0.01, 0).failure == "its loss or gradient is not finite"
    assert ShortRuns(runs.process, runs.task._replace(skips=True))(0.01, 0).failure is None
    assert "Tried to allocate" in (runs_of(loss=full)(0.01, 0).failure or "")


def test_the_figure_is_the_mean_over_the_counted_items_of_the_last_quarter() -> None:
    steps = [(8.0, 1.0)] * 6 + [(2.0, 3.0), (6.0, 1.0)]
    assert result_of(0.1, steps) == LrTrialResult(0.1, 3.0, 8.0, None)
    uncounted = [(math.nan, 0.0), (5.0, 2.0), *steps[:4], (math.nan, 0.0), (1.0, 1.0)]
    assert result_of(0.1, uncounted) == LrTrialResult(0.1, 1.0, 5.0, None)
    assert result_of(0.1, steps[:3], "gone") == LrTrialResult(0.1, None, 8.0, "gone")
