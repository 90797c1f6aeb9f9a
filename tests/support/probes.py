"""Small workloads, and probes of them that are listened to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autobatch import Probe, Progress, Result, Workload
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run
from autobatch.core.options import options_from
from tests.support.training import Rows, adamw, make_workload

WIDTH = 16


def vectors(count: int = 600, width: int = WIDTH) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(torch.randn(count, width, generator=generator), torch.arange(count) % 4)


def mlp(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, 4))


def work(model: Callable[[], nn.Module] = mlp, **fields: Any) -> Workload:
    known = {"train_data": vectors(), "optimizer": adamw, "learning_rate": 1e-3}
    return make_workload(**{"model": model, **known, **fields})


class Listener(Progress):
    """Keeps the notes, and counts the attempts."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.sizes: list[int] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def attempted(self, attempt) -> None:
        self.sizes.append(attempt.micro_batch)


def probed(workload: Workload, **options) -> tuple[Result, Listener]:
    listener = Listener()
    asked = options_from("probe", {"device": "cpu", "memory_budget": "80KiB"} | options)
    return run_command(Run(workload=workload, options=asked, progress=listener)), listener


def probe_of(micro_batch: int) -> Probe:
    """Return the record of a probe that nothing was run for."""
    return Probe(
        micro_batch=micro_batch,
        limited_by="memory",
        upper_bound_by="run",
        predicted_micro_batch=None,
        oom_count=0,
        attempts=[],
    )
