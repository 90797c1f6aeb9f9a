"""A run on disk that trains in milliseconds, with all the state that a run can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autobatch import Progress, Workload
from autobatch.core.check_options import options_from
from autobatch.core.options import Options
from autobatch.planning import make_plan
from autobatch.setup.setup import open_setup
from autobatch.training.build import build_sampler
from autobatch.training.resume import load_run_state
from autobatch.training.run import RunInputs, train_plan
from autobatch.training.run_folder import RunFiles

BATCH, MICRO_BATCH, SAMPLES = 8, 4, 48
EMA = 0.9


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


def trained_run(
    out: Path, *, steps: int, workload: Workload, resume: bool = False, split_check: Any = "off"
) -> nn.Module:
    """Train, with a checkpoint and a validation after every step.

    Args:
        out: folder of the run.
        steps: optimizer steps of the whole run.
        workload: what to train.
        resume: continue from the newest checkpoint.
        split_check: as the option.

    Returns:
        The trained model.
    """
    setup = open_setup(
        workload, Options().with_values(device="cpu", memory_budget="64MiB", precision="fp32", ema=EMA)
    )
    asked = {"target_batch": BATCH, "steps": steps, "ema": EMA, "split_check": split_check}
    options = options_from("fit", {**asked, "checkpoint_every": 1, "validate_every": 1})
    stored = load_run_state(out) if resume else None
    _, model = train_plan(
        RunInputs(
            setup=setup,
            plan=make_plan(target_batch=BATCH, micro_batch_limit=MICRO_BATCH, learning_rate=0.01),
            sampler=build_sampler(SAMPLES, options),
            key={},
            resumed=stored,
            is_exact=True,
        ),
        RunFiles(out=out, options=options),
        progress=Progress(),
    )
    return model


def weights_of(model: nn.Module) -> Tensor:
    """Return all weights, in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
