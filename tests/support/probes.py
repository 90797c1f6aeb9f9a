"""Small workloads, and probes of them that are listened to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from autobatch import Workload
from autobatch.api.pipeline import RunContext, run_probe
from autobatch.core.options import ProbeOptions, options_from
from autobatch.core.progress import Progress
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.child import ThisProcess
from autobatch.probing.find_limit import Limit, ProbeLimits, find_limit
from autobatch.report.result import Result

WIDTH = 16


def vectors(count: int = 600, width: int = WIDTH) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, width, generator=generator), torch.arange(count) % 4)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def adamw(parameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate)


def amsgrad(parameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, amsgrad=True)


def mlp(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, 4))


def work(model: Callable[[], nn.Module] = mlp, **fields) -> Workload:
    defaults = {"train_data": vectors(), "loss": classify, "optimizer": adamw, "learning_rate": 1e-3}
    return Workload(model=model, **(defaults | fields))


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
    asked = options_from(ProbeOptions, {"device": "cpu", "memory_budget": "80KiB"} | options)
    return run_probe(workload, asked, RunContext(progress=listener)), listener


def limit_of(setup: TrainSetup, home: Path, progress: Progress | None = None, **limits) -> Limit:
    """Find the largest micro-batch on a setup that is open here."""
    return find_limit(ThisProcess(setup), ProbeLimits(**limits), home=home, progress=progress or Progress())
