"""Studies, trials and short runs: search spaces and workloads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from torch import nn

from autobatch import Workload
from autobatch.core.progress import Progress
from autobatch.core.records import Tuning
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import Setup, describe_setup
from autobatch.tuning.fastest import Knob, Search
from autobatch.tuning.study import open_study
from autobatch.tuning.trial import Trials
from tests.support.options import as_options
from tests.support.probes import vectors, work
from tests.support.training import Augmented, Rows, make_setup, make_workload, mean_loss, network, points

# Studies of configurations.

AXES = [
    Knob("micro_batch_shift", (0, 1, 2, 3)),
    Knob("precision", ("fp32", "bf16")),
    Knob("channels_last", (False, True)),
    Knob("optimizer", ("default", "foreach", "fused")),
]


def speed_of(values: Any) -> float:
    """Return samples per second: bf16 and half the micro-batch are faster, most else is slower."""
    shift = [1.0, 1.1, 0.9, 0.7][int(values.get("micro_batch_shift", 0))]
    precision = 1.5 if values.get("precision") == "bf16" else 1.0
    layout = 0.7 if values.get("channels_last") else 1.0
    return 1000 * shift * precision * layout * (1.06 if values.get("optimizer") == "fused" else 1.0)


@dataclass
class FakeTrials:
    """Trials that measure nothing, and keep the configurations that they were asked for."""

    speed: Callable[[Any], float] = speed_of
    """Returns samples per second, or raises `Infeasible`."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, values: Any) -> float:
        self.asked.append(dict(values))
        return self.speed(values)

    def sizes(self, values: Any) -> list[int]:
        return [64]


def study_in(home: Path, made: Setup | None = None, **fields: Any) -> optuna.Study:
    """Return the study of a setup."""
    options = as_options("fit", **{"target_batch": 64, **fields})
    return open_study(describe_setup(made or trial_setup()), options, home, "maximize", "speed")


def search(
    trials: Any = None,
    knobs: list[Knob] = AXES,
    *,
    budget: int | None = None,
    home: Path | None = None,
    **more: Any,
) -> Tuning:
    """Search in a study of a home, or in memory, in at most 20 trials."""
    study = optuna.create_study(direction="maximize") if home is None else study_in(home)
    budget = budget or min(20, math.prod(len(knob.choices) for knob in knobs))
    fields = {"study": study, "knobs": knobs, "budget": budget, "progress": Progress(), **more}
    return Search(trials=trials or FakeTrials(), **fields).find()


def open_journal(home: Path) -> optuna.Study:
    (path,) = (home / "studies").glob("*.log")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


# Trials.


def trial_setup(
    budget: str | int = "1GiB", *, clock: Callable[[], float] | None = None, **fields: Any
) -> Setup:
    made = make_setup(work(**{"train_data": vectors(64), **fields}), budget)
    return made if clock is None else replace(made, clock=clock)


def make_trials(made: Setup, limit: int = 8, **fields: Any) -> Trials:
    """Return trials in this process."""
    plan = make_plan(target_batch=64, micro_batch_limit=limit, learning_rate=0.01)
    return Trials(process=ThisProcess(made), plan=plan, **fields)


class Signed(Augmented):
    """Samples that carry the id of the process that made them."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return *super().__getitem__(index), os.getpid()


def signed(seen: set[int], **fields: Any) -> Workload:
    """Return a workload that collects the ids of the processes that made its training samples."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.update(batch[2].tolist())
        return mean_loss(model, batch[:2])

    data, model = Signed(*points(64, dtype=torch.float32).columns), partial(network, torch.float32)
    return make_workload(**{"model": model, "train_data": data, "loss": loss, **fields})


# Short runs of a linear model.

STEPS, FEATURES, SAMPLES = 24, 6, 32


def table() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs of different scales, so that the best learning rate is a compromise, and targets."""
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((SAMPLES, FEATURES)) * np.array([2.0, 1.5, 1.0, 0.7, 0.5, 0.3])
    return inputs, inputs @ draw.standard_normal(FEATURES) + 0.1 * draw.standard_normal(SAMPLES)


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
