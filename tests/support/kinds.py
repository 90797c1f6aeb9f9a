"""Kinds of runs to interrupt and resume, each with another kind of state."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
)

from tests.support.detection import count_shown, drawn_terms
from tests.support.overflow import flagged
from tests.support.overflow import loss as overflowing_loss
from tests.support.training import (
    INFO_NCE,
    Rows,
    language_model,
    make_workload,
    network,
    points,
    token_loss,
    tokens,
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


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


def augmented():
    data = Augmented(*points(dtype=torch.float32).columns)
    return make_workload(model=Everything, train_data=data, optimizer=adamw), {}


def scheduled(make):
    def build():
        return make_workload(
            model=Everything, train_data=points(dtype=torch.float32), optimizer=adamw, schedule=make
        ), {}

    return build


def ragged():
    return make_workload(
        model=lambda: language_model(torch.float32), train_data=tokens(), loss=token_loss, optimizer=adamw
    ), {}


def overflowing():
    """Make a workload that overflows before, at and after most of the steps to resume from."""
    workload = make_workload(
        model=lambda: network(torch.float32),
        train_data=flagged({3, 17}, samples=24),
        loss=overflowing_loss,
        optimizer=adamw,
        schedule=CosineAnnealingLR,
    )
    return workload, {"precision": "fp16"}


def float32_state():
    return make_workload(
        model=lambda: network(torch.bfloat16),
        train_data=Rows(points().columns[0].bfloat16(), points().columns[1]),
        optimizer=lambda params, lr: Float32State(params, lr=0.003),
    ), {}


def two_optimizers():
    def optimizers(params, lr):
        params = list(params)
        return torch.optim.SGD(params[:2], lr=lr, momentum=0.9), torch.optim.RMSprop(params[2:], lr=0.01)

    return make_workload(optimizer=optimizers, schedule=lambda o, steps: LinearLR(o, 1.0, 0.1, steps)), {}


def followed():
    return make_workload(model=Followed, after_step=Followed.follow, optimizer=adamw), {}


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


def thawed():
    return make_workload(
        model=Thawed, train_data=points(dtype=torch.float32), after_step=Thawed.after_step, optimizer=adamw
    ), {}


def averaged(make):
    def build():
        workload, options = make()
        return workload, {**options, "ema": 0.9}

    return build


def contrastive():
    data = Augmented(*points(dtype=torch.float32).columns)
    return make_workload(model=Everything, train_data=data, loss=INFO_NCE, optimizer=adamw), {}


def several_terms():
    data = Augmented(*points(dtype=torch.float32).columns)
    workload = make_workload(
        model=Everything, train_data=data, loss=drawn_terms, counts=count_shown, optimizer=adamw
    )
    return workload, {}


RUNS = {
    "augmented": augmented,
    "augmented, averaged": averaged(augmented),
    "one cycle": scheduled(lambda o, steps: OneCycleLR(o, 0.05, total_steps=steps + 1)),
    "numpy scalars": scheduled(lambda o, steps: LambdaLR(o, lambda step: np.cos(step / steps))),
    "ragged": ragged,
    "overflowing": overflowing,
    "float32 state": float32_state,
    "two optimizers": two_optimizers,
    "followed, averaged": averaged(followed),
    "thawed, averaged": averaged(thawed),
    "whole batch": contrastive,
    "several terms": several_terms,
}
