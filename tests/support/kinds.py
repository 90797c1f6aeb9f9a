"""Kinds of runs to interrupt and resume, each with another kind of state."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from autobatch import Workload
from tests.support.detection import count_shown, drawn_terms
from tests.support.overflow import flagged
from tests.support.overflow import loss as overflowing_loss
from tests.support.training import (
    INFO_NCE,
    Rows,
    make_workload,
    network,
    points,
)


class Augmented(Rows):
    """Rows augmented by the random generators of Python, NumPy and torch."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return inputs * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.randn(5), labels


class Everything(nn.Module):
    """Model with dropout, batch statistics, and an average that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))
        self.register_buffer("average", torch.zeros(3), persistent=False)

    def forward(self, inputs):
        out = self.body(inputs)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        return out + self.average


class Followed(nn.Module):
    """Model with a teacher that follows it, and a scale with bounds; both change after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(), network()
        self.teacher.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.95], dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        return self.student(inputs) * self.scale - 0.5 * self.teacher(inputs)

    def follow(self) -> None:
        """Let the teacher follow, more slowly from step to step, and bound the scale."""
        self.steps += 1
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.lerp_(other, 1 / (1 + self.steps.double()))
        self.scale.clamp_(0.96, 1.0)


class Float32State(torch.optim.SGD):
    """SGD with float32 copies of 16-bit parameters as state, which torch rounds on loading."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("copy", parameter.detach().float().clone())
                state["copy"] -= group["lr"] * parameter.grad.float()
                parameter.data.copy_(state["copy"])


class Thawed(nn.Module):
    """Model whose first layer begins to train after three steps, and whose statistics freeze after five."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        return self.head(self.norm(self.frozen(inputs)))

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.frozen.requires_grad_(True)
        if self.steps == 5:
            self.norm.eval()


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


def two_optimizers(params, lr):
    params = list(params)
    return torch.optim.SGD(params[:2], lr=lr, momentum=0.9), torch.optim.RMSprop(params[2:], lr=0.01)


def numpy_schedule(optimizer, steps):
    """Return a schedule whose state has scalars of NumPy, which a safe loader refuses."""
    return LambdaLR(optimizer, lambda step: np.cos(step / steps))


SINGLE = points(dtype=torch.float32)
AUGMENTED = {"model": Everything, "train_data": Augmented(*SINGLE.columns), "optimizer": adamw}
KINDS = {
    "augmented, averaged": (
        {**AUGMENTED, "schedule": lambda o, steps: OneCycleLR(o, 0.05, total_steps=steps + 1)},
        {"ema": 0.9},
    ),
    # Some samples overflow before, at and after most of the steps to resume from.
    "overflowing": (
        {
            "model": lambda: network(torch.float32),
            "train_data": flagged({3, 17}, samples=24),
            "loss": overflowing_loss,
            "optimizer": adamw,
            "schedule": CosineAnnealingLR,
        },
        {"precision": "fp16"},
    ),
    "float32 state": (
        {
            "model": lambda: network(torch.bfloat16),
            "train_data": Rows(points().columns[0].bfloat16(), points().columns[1]),
            "optimizer": lambda params, lr: Float32State(params, lr=0.003),
        },
        {},
    ),
    "two optimizers": ({"optimizer": two_optimizers, "schedule": numpy_schedule}, {}),
    "followed, averaged": (
        {"model": Followed, "after_step": Followed.follow, "optimizer": adamw},
        {"ema": 0.9},
    ),
    "thawed, averaged": (
        {"model": Thawed, "train_data": SINGLE, "after_step": Thawed.after_step, "optimizer": adamw},
        {"ema": 0.9},
    ),
    "whole batch": ({**AUGMENTED, "loss": INFO_NCE}, {}),
    "several terms": ({**AUGMENTED, "loss": drawn_terms, "counts": count_shown}, {}),
}
"""Fields of a workload and options of a loop."""


def run_of(kind: str) -> tuple[Workload, dict[str, Any]]:
    """Make a workload of a kind, and the options of its loop."""
    fields, options = KINDS[kind]
    return make_workload(**fields), options


RUNS = {kind: partial(run_of, kind) for kind in KINDS}
