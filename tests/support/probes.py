"""Small workloads, and probes of them that are listened to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from autobatch import Probe, Progress, Result, Workload
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run
from autobatch.core.options import options_from

WIDTH = 16


class RandomVectors(Dataset):
    """Samples that are augmented: reading one draws from every generator."""

    def __init__(self, width: int = WIDTH, count: int = 120) -> None:
        self.width, self.count = width, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = random.random() + float(np.random.rand())
        return torch.randn(self.width) + shift, torch.tensor(index % 4)


class Sequences(Dataset):
    """Sequences of these lengths, with labels."""

    def __init__(self, lengths: list[int], width: int = 8) -> None:
        self.lengths, self.width = lengths, width

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(self.lengths[index], self.width), torch.tensor(index % 4)


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.stack(labels)


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
    asked = options_from("probe", {"device": "cpu", "memory_budget": "80KiB"} | options)
    return run_command(Run(workload=workload, options=asked, progress=listener)), listener


def probe_of(micro_batch: int, **changes: Any) -> Probe:
    """Return the record of a probe that nothing was run for."""
    fields: dict[str, Any] = {
        "limited_by": "memory",
        "upper_bound_by": "run",
        "predicted_micro_batch": None,
        "oom_count": 0,
        "attempts": [],
    }
    return Probe(micro_batch=micro_batch, **{**fields, **changes})
