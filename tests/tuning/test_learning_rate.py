"""The search for a learning rate, against a grid in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from autobatch.tuning.learning_rate import REACH, LrTrialResult, result_of
from tests.support.short_runs import (
    STEPS,
    Curves,
    descend,
    find_rate,
    grid,
    linear_setup,
    run_in,
    squares,
    stored_trials,
    task_of,
)
from tests.support.untouched import fingerprint, with_gradients


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
        assert (trial.user_attrs["failure"] is None) is row.feasible
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


def test_the_best_is_compared_with_the_default_on_other_data() -> None:
    """What is better on the trials' own data alone is luck."""
    curves = Curves(lambda rate, seed, step: 2.0 - step / STEPS * (1 + (seed == 0) * (rate > 0.02)))
    found = find_rate(run=curves)
    assert found.best == 0.01
    assert "within noise" in found.notes[0]
    assert [pair.seed for pair in found.pairs] == [0, 1, 2]
    others = [(rate == 0.01, seed) for rate, seed in curves.begun if seed]
    assert others == [(True, 1), (False, 1), (False, 2), (True, 2)]


@pytest.mark.parametrize(
    ("loss", "trials", "best", "note"),
    [
        (
            lambda *_: math.nan,
            4,
            0.01,
            "none of 4 learning rates trained. The default one: no loss was finite",
        ),
        (lambda rate, *_: math.inf if rate > 0.01 else 1.0, 6, 0.01, "no other one reached a lower loss"),
        (lambda *_: 1.0, 0, 0.01, "its own trial was not run"),
        (
            lambda rate, _, step: 5.0 - step / STEPS * math.log(rate / 1e-4),
            16,
            None,
            "at the edge of the tried range",
        ),
    ],
)
def test_the_answer_is_explained(loss, trials: int, best: float | None, note: str) -> None:
    found = find_rate(run=Curves(loss), trials=trials)
    assert note in found.notes[0]
    assert found.trials == trials
    assert found.best == best if best is not None else found.best > 0.01 * REACH / 2


def test_a_study_resumes_where_it_stopped(tmp_path: Path) -> None:
    curves = Curves(lambda rate, seed, step: 5.0 - step * rate, steps=8)
    first = find_rate(run=curves, trials=3, storage=str(tmp_path / "s.log"))
    begun = {rate for rate, seed in curves.begun if not seed}
    curves.begun.clear()
    found = find_rate(run=curves, trials=6, storage=str(tmp_path / "s.log"))
    assert (found.trials, found.history[:3]) == (6, first.history)
    assert not begun & {rate for rate, seed in curves.begun if not seed}


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

    found = find_rate(run=Curves(loss), trials=5)
    assert (found.best != 0.01) is better
    assert [pair.gain for pair in found.pairs] == pytest.approx(gains)


def test_a_non_finite_gradient_ends_the_run() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        return squares(model, batch) + 0 * (model.weights - model.weights.detach()).abs().sqrt().sum()  # type: ignore[operator, union-attr]

    spoiled_setup, task = linear_setup(loss=spoiled), task_of(0.01)
    assert run_in(spoiled_setup, task).failure == "its loss or gradient is not finite"
    assert run_in(spoiled_setup, task._replace(skips=True)).failure is None


def test_a_short_run_that_runs_out_of_memory_is_infeasible() -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    assert "Tried to allocate" in (run_in(linear_setup(loss=full), task_of(0.01)).failure or "")


def test_short_runs_leave_the_model_unchanged() -> None:
    made = linear_setup()
    with_gradients(made.model)
    before = fingerprint(made.model)
    assert find_rate(made, trials=8).best != 0.01
    assert fingerprint(made.model) == before


def test_the_figure_is_the_mean_over_the_counted_items_of_the_last_quarter() -> None:
    steps = [(8.0, 1.0)] * 6 + [(2.0, 3.0), (6.0, 1.0)]
    assert result_of(0.1, steps) == LrTrialResult(0.1, 3.0, 8.0, None)
    uncounted = [(math.nan, 0.0), (5.0, 2.0), *steps[:4], (math.nan, 0.0), (1.0, 1.0)]
    assert result_of(0.1, uncounted) == LrTrialResult(0.1, 1.0, 5.0, None)
    assert result_of(0.1, steps[:3], "gone") == LrTrialResult(0.1, None, 8.0, "gone")
