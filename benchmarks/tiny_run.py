"""A run on disk that trains in milliseconds, with all the state that a run can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autobatch import Progress, Workload
from autobatch.api.inputs import begin, resume
from autobatch.api.run import Run
from autobatch.core.check_options import options_from
from autobatch.training.run import train_plan
from autobatch.training.run_folder import RunFiles

SAMPLES = 48


class Points(Dataset[Any]):
    """Random points, each with a label."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._points = torch.randn(samples, 6, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._points[index], index % 3


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def tiny_workload() -> Workload:
    """Return a workload of a small network in float64, with validation and AdamW."""
    return Workload(
        model=_model,
        train_data=Points(SAMPLES),
        validation_data=Points(10),
        loss=_loss,
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR,
        learning_rate=0.01,
    )


def tiny_run(out: Path, *, workload: Workload | None = None, **more: Any) -> Run:
    """Return a run of ``fit`` that writes a checkpoint after every step; ``more`` are other options."""
    asked: dict[str, Any] = {
        "target_batch": 8, "max_micro_batch": 4, "steps": 3, "ema": 0.9, "split_check": "off", "trials": 0,
        "checkpoint_every": 1, "device": "cpu", "memory_budget": "64MiB", "out": str(out),
    }  # fmt: skip
    options = options_from("fit", asked | more)
    return Run(workload=workload or tiny_workload(), options=options, progress=Progress())


class Trained(NamedTuple):
    """The end of a run."""

    model: nn.Module
    resumed: Any
    """What it was resumed from; None if it was not."""


def train(run: Run) -> Trained:
    """Train, and write the checkpoints, but no result and no page."""
    with run.held:
        inputs = (resume if run.options.train.resume else begin)(run)
        assert run.out is not None
        files = RunFiles(out=run.out, options=run.options)
        _, model = train_plan(inputs, files, progress=run.progress)
        return Trained(model, inputs.resumed)


def weights_of(model: nn.Module) -> Tensor:
    """Return all weights, in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
