"""Workloads with all the state that a run may have, and losses whose gradient overflows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from autobatch import Workload
from tests.support.detection import count_shown, drawn_terms
from tests.support.training import (
    INFO_NCE,
    Augmented,
    Rows,
    amsgrad,
    make_workload,
    mean_loss,
    network,
    points,
    then,
)


class Overflow(torch.autograd.Function):
    """Identity whose gradient is infinite if a flag is set."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (bad,) = ctx.saved_tensors
        return torch.where(bad.any(), torch.full_like(gradient, math.inf), gradient), None


def flagged(bad: set[int], samples: int = 32) -> Rows:
    """Make points with a flag on those that overflow."""
    data = points(samples, dtype=torch.float32)
    flags = torch.zeros(samples, dtype=torch.bool)
    flags[list(bad)] = True
    return Rows(*data.columns, flags)


def overflowing_loss(model: nn.Module, batch) -> torch.Tensor:
    inputs, labels, bad = batch
    return Overflow.apply(mean_loss(model, (inputs, labels)), bad)


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


def stateful(**changes: Any) -> Workload:
    """Make a workload with all the state that a step changes, and draws in its data and its model."""
    known = {
        "model": Everything,
        "train_data": Augmented(*points(dtype=torch.float32).columns),
        "optimizer": amsgrad,
        "learning_rate": 0.01,
    }
    return make_workload(**{**known, **changes})


def two_optimizers(params, lr):
    params = list(params)
    return torch.optim.SGD(params[:2], lr=lr, momentum=0.9), torch.optim.RMSprop(params[2:], lr=0.01)


def numpy_schedule(optimizer, steps):
    """Return a schedule whose state has scalars of NumPy, which a safe loader refuses."""
    return LambdaLR(optimizer, lambda step: np.cos(step / steps))


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "augmented, averaged": (
        partial(stateful, schedule=lambda made, steps: OneCycleLR(made, 0.05, total_steps=steps + 1)),
        {"ema": 0.9},
    ),
    # Some samples overflow before, at and after most of the steps to resume from.
    "overflowing": (
        partial(
            stateful, model=lambda: network(torch.float32), train_data=flagged({3, 17}, samples=24),
            loss=overflowing_loss, schedule=CosineAnnealingLR,
        ),
        {"precision": "fp16"},
    ),
    "float32 state": (
        partial(
            make_workload, model=lambda: network(torch.bfloat16), optimizer=Float32State, learning_rate=0.003,
            train_data=Rows(points().columns[0].bfloat16(), points().columns[1]),
        ),
        {},
    ),
    "two optimizers": (partial(make_workload, optimizer=two_optimizers, schedule=numpy_schedule), {}),
    "followed, averaged": (
        partial(make_workload, model=Followed, optimizer=then(amsgrad, Followed.follow)),
        {"ema": 0.9},
    ),
    "thawed, averaged": (
        partial(stateful, model=Thawed, optimizer=then(amsgrad, Thawed.after_step)),
        {"ema": 0.9},
    ),
    "whole batch": (partial(stateful, loss=INFO_NCE), {}),
    "several terms": (partial(stateful, loss=drawn_terms, counts=count_shown), {}),
}  # fmt: skip
"""What makes a workload, and the options of its loop."""


def run_of(kind: str) -> tuple[Workload, dict[str, Any]]:
    """Make a workload of a kind, and the options of its loop."""
    make, options = RUNS[kind]
    return make(), options
