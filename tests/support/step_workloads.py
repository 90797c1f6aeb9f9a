"""Small workloads that allocate in different ways, and the setups and settings to run and to trace them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autobatch import Loss, Workload
from autobatch.estimates.traced_step import TracedStep
from autobatch.rehearsal.setup import Setup
from benchmarks.workloads import Gpt
from tests.support.probes import work
from tests.support.training import Rows, adamw, make_setup

TOKENS = list(torch.arange(64 * 17).view(64, 17) % 61)
"""Sequences of 17 tokens."""
IMAGES = Rows(torch.randn(64, 3, 12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 5)
"""Small images of 5 classes."""
make = partial(work, train_data=IMAGES)
setup = partial(make_setup, max_grad_norm=1.0)


class Residual(nn.Module):
    """A block with batch statistics and dropout, which recomputation could repeat wrongly."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * torch.relu(self.body(x))


def convolutional(dropout: float = 0.3) -> nn.Module:
    """Two residual blocks among other layers, of which one works in place."""
    begin = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    blocks = [Residual(dropout), Residual(dropout), nn.Conv2d(4, 16, 3, stride=2)]
    return nn.Sequential(*begin, *blocks, nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def token_loss(model, batch):
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return Loss(total, batch[:, 1:].numel())


def sgd(parameters, learning_rate):
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 5))


def transformer(optimizer: Any = adamw, *, depth: int = 2, recompute: bool = False) -> Workload:
    model = partial(Gpt, 16, depth, vocabulary=61, recompute=recompute)
    return make(model, train_data=TOKENS, loss=token_loss, optimizer=optimizer)


WORKLOADS = {
    "perceptron": partial(make, perceptron),
    "convolutions": partial(make, convolutional, optimizer=sgd),
    "transformer": transformer,
    "recomputed": partial(transformer, recompute=True),
}


def traced_step(of: Setup, *, capability: tuple[int, int] | None = None, **fields: Any) -> TracedStep:
    """Return what traces the steps of a setup on fakes; None for the operators of the CPU."""
    return TracedStep(setup=of, capability=capability, **fields)
