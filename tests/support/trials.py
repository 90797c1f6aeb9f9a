"""Workloads, setups and runners of trials, with a clock that tests advance."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autobatch import Workload
from autobatch.core.knobs import TuningContext
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.setup.session import Session, ThisProcess
from autobatch.setup.setup import Setup
from autobatch.tuning.trial import Trials, TrialSpec, look_at_workload
from tests.support.kinds import Augmented
from tests.support.training import Rows, make_setup, make_workload, mean_loss, points

DEFAULTS: dict[str, Any] = {
    "micro_batch_shift": 0,
    "precision": "fp32",
    "checkpointing": "none",
    "channels_last": False,
    "optimizer": "default",
}


LOADING: dict[str, Any] = {"micro_batch_shift": 0, "loader_workers": 0, "expandable_segments": False}
"""Defaults of the knobs that change how data is loaded and memory is kept."""


class Deep(nn.Module):
    """A model whose blocks' activations take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def deep_rows(samples: int = 64) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(
        torch.randn(samples, 16, generator=generator), torch.randint(3, (samples,), generator=generator)
    )


def trial_workload(**fields: Any) -> Workload:
    return make_workload(
        **{
            "model": Deep,
            "train_data": deep_rows(),
            "optimizer": lambda params, lr: torch.optim.AdamW(params, lr=lr),
            "learning_rate": 1e-3,
            **fields,
        }
    )


def trial_setup(
    budget: str | int = "1GiB", *, clock: Callable[[], float] | None = None, **fields: Any
) -> Setup:
    made = make_setup(trial_workload(**fields), budget)
    return made if clock is None else replace(made, clock=clock)


def setup_of(workload: Workload, device: Any | None = None) -> Setup:
    return make_setup(workload, device=device)


def task_with(**fields: Any) -> TrialSpec:
    task = TrialSpec(limit=8, cap=64, samples=64, planned_steps=100, seconds=0.0, defaults=DEFAULTS)
    return replace(task, **fields)


def make_trials(made: Setup, **fields: Any) -> Trials:
    """Return the trials of a study in this process; ``fields`` change its `TrialSpec`."""
    return Trials(ThisProcess(made), task_with(**fields))


def loading_trials(workload: Workload, device: Any | None = None, **fields: Any) -> Trials:
    """Return trials that choose how data is loaded."""
    return make_trials(setup_of(workload, device), **{"defaults": LOADING, **fields})


def context_of(made: Setup, **fields: Any) -> TuningContext:
    """Return what decides which knobs apply; ``fields`` change the `TrialSpec`."""
    return look_at_workload(Session(made), task_with(**fields))


def changed(**values: Any) -> Any:
    return {**DEFAULTS, **values}


class Time:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_fields(time: Time, *, a_sample: float = 1.0, a_step: float = 5.0) -> dict[str, Any]:
    """Return a loss and an optimizer that take a fixed time per sample and per step."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            time.now += a_step

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.now += a_sample * len(batch[0])
        return mean_loss(model, batch)

    return {"loss": loss, "optimizer": lambda params, lr: Slow(params, lr=lr)}


class Signed(Augmented):
    """Samples that carry the id of the process that made them."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return inputs, labels, os.getpid()


def signed(seen: set[int], **fields: Any) -> Workload:
    """Return a workload that collects the ids of the processes that made its training samples."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels, made_by = batch
        if torch.is_grad_enabled():
            seen.update(made_by.tolist())
        return mean_loss(model, (inputs, labels))

    data = Signed(*points(64, dtype=torch.float32).columns)
    model = lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
    return make_workload(**{"model": model, "train_data": data, "loss": loss, **fields})


def simulated_gpu(folder: Path, budget: str, **more: Any) -> SimulatedDevice:
    return SimulatedDevice(load_profile("rtx-4090", user_dir=folder), memory_budget=budget, **more)


def deep_layers() -> nn.Module:
    layers = [nn.Linear(640, 640) for _ in range(6)]
    return nn.Sequential(nn.Linear(5, 640), *layers, nn.Linear(640, 3))
