"""Short runs of a linear model, with gradient descent by hand as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from torch import nn

from autobatch import Workload
from autobatch.core.records import LrTuning
from autobatch.planning import make_plan
from autobatch.setup.session import ThisProcess
from autobatch.setup.setup import Setup
from autobatch.tuning.configuration import Budget, StudyLocation
from autobatch.tuning.learning_rate import (
    REACH,
    LrTrialResult,
    LrTrialSpec,
    ShortRuns,
    find_learning_rate,
    result_of,
)
from tests.support.training import Rows, make_workload
from tests.support.trials import setup_of

STEPS = 24
FEATURES = 6
SAMPLES = 32


def table(seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs of different scales, so that the best learning rate is a compromise, and targets."""
    draw = np.random.default_rng(seed)
    inputs = draw.standard_normal((SAMPLES, FEATURES)) * np.array([2.0, 1.5, 1.0, 0.7, 0.5, 0.3])
    return inputs, inputs @ draw.standard_normal(FEATURES) + 0.1 * draw.standard_normal(SAMPLES)


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
    """Return the best of two thousand learning rates within reach, and its loss."""
    rates = default * np.geomspace(1 / REACH, REACH, 2001)
    losses = np.array([descend(float(rate)) for rate in rates])
    best = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    return float(rates[best]), float(losses[best])


class Linear(nn.Module):
    """A linear model that starts at zero and counts its training samples."""

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


def linear_workload(**fields: Any) -> Workload:
    data = Rows(*(torch.from_numpy(column) for column in table()))
    return make_workload(**{"model": Linear, "train_data": data, "loss": squares, **fields})


def linear_setup(**fields: Any) -> Setup:
    return setup_of(linear_workload(**fields))


def task_of(default: float, *, target_batch: int = SAMPLES, steps: int = STEPS) -> LrTrialSpec:
    plan = make_plan(target_batch=target_batch, micro_batch_limit=12, learning_rate=default)
    return LrTrialSpec(plan, steps)


def find_rate(
    made: Setup | None = None,
    *,
    default: float = 0.01,
    trials: int = 12,
    seed: int = 0,
    storage: str | None = None,
    run: Curves | None = None,
    made_for: dict[str, Any] | None = None,
    **more: Any,
) -> LrTuning:
    task = task_of(default) if run is None else run.task
    return find_learning_rate(
        run or ShortRuns(ThisProcess(made or linear_setup()), task),
        task,
        budget=Budget(trials, more.pop("expired", lambda: False)),
        seed=seed,
        place=StudyLocation("study-learning-rate", storage, made_for or {"model": "m"}),
        **more,
    )


def stored_trials(path: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name="study-learning-rate", storage=storage).trials


class Curves:
    """Runs whose losses are a function of the learning rate, the seed and the step."""

    def __init__(self, loss: Callable[[float, int, int], float], *, steps: int = STEPS) -> None:
        self.task = task_of(0.01, steps=steps)
        self.loss = loss
        self.begun: list[tuple[float, int]] = []

    def __call__(self, rate: float, seed: int) -> LrTrialResult:
        self.begun.append((rate, seed))
        return result_of(rate, [(self.loss(rate, seed, step), 1.0) for step in range(self.task.steps)])


def run_in(made: Setup, task: LrTrialSpec, seed: int = 0) -> LrTrialResult:
    """Train a short run at the learning rate of its plan in this process."""
    return ShortRuns(ThisProcess(made), task)(task.plan.learning_rate, seed)
