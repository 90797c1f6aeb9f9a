"""Workloads whose memory changes with the steps: a late layer, or longer samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autobatch import Progress, Training, Workload
from autobatch.core.units import MiB
from autobatch.device.base import Device
from autobatch.training.run import train
from tests.support.runs import settings
from tests.support.training import Rows, make_loop, mean_loss, weights

TARGET = 64
SAMPLE_BYTES = 40 * MiB
"""Taken by the late layer on the host for each sample."""


class Late(nn.Module):
    """Network that takes more memory from a step on. It counts steps, not passes, in a buffer."""

    def __init__(self, kind: str, since: int) -> None:
        super().__init__()
        self.kind, self.since = kind, since
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 3)
        self.extra = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(64, 64), nn.Tanh())))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        is_late = int(self.steps) >= self.since
        if self.kind == "longer samples" and self.training and not is_late:
            inputs = inputs[:, :4]
        hidden = self.inner(inputs).relu()
        if self.kind == "a layer" and is_late:
            hidden = self.extra(hidden)
        if self.kind == "on the host" and is_late:
            hidden = hidden + torch.empty(len(hidden), SAMPLE_BYTES, dtype=torch.uint8)[0, :0].sum()
        return self.outer(hidden.mean(1))


def samples(number: int, length: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, length, 16, dtype=torch.float64, generator=generator)
    return Rows(inputs, torch.randint(3, (number,), generator=generator))


def late_workload(kind: str, since: int) -> Workload:
    """Make a workload that takes more memory from a step on."""
    models = list[Late]()

    def build() -> Late:
        models.append(Late(kind, since))
        return models[-1]

    def after_step(*_: object) -> None:
        models[-1].steps.add_(1)

    def optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=rate)
        made.register_step_post_hook(after_step)
        return made

    return Workload(
        model=build,
        train_data=samples(128, 24),
        validation_data=samples(48, 128 if kind == "validation" else 24, seed=1),
        loss=mean_loss,
        optimizer=optimizer,
        learning_rate=0.01,
    )


def trained(
    workload: Workload,
    out: Path,
    heard: Progress,
    *,
    steps: int,
    micro_batch: int = TARGET,
    device: Device | None = None,
) -> tuple[Tensor, Training]:
    """Train on a device, else on the CPU, with three validations; return the weights and the record."""
    options: dict[str, Any] = {"target_batch": TARGET, "micro_batch": micro_batch, "steps": steps}
    files = settings(out, target_batch=TARGET, validate_every=steps // 2)
    if device is None:
        loop = make_loop(workload, **options)
        record = train(loop, files, heard, None)
        return weights(loop.train_state.model), record
    with device.training() as meter:
        loop = make_loop(workload, **options, device=device, meter=meter)
        meter.count(one.data for one in loop.train_state.model.parameters())
        record = train(loop, files, heard, None)
        return weights(loop.train_state.model), record
