"""Small workloads that allocate in different ways, and the setups and settings to run and to trace them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autobatch import Loss, Workload
from autobatch.core.units import GiB
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory
from autobatch.estimates.traced_step import TracedStep
from autobatch.rehearsal.setup import Setup
from tests.support.training import Rows, make_setup

TOKENS = list(torch.arange(64 * 17).view(64, 17) % 61)
"""Sequences of 17 tokens."""
IMAGES = [(torch.zeros(3, 12, 12), number % 5) for number in range(64)]
"""Small images with a class."""


class Residual(nn.Module):
    """A block with batch statistics and dropout, which recomputation could repeat wrongly."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * torch.relu(self.body(x))


def convolutional(dropout: float = 0.3) -> nn.Module:
    """Two residual blocks for the `images`."""
    body = [nn.Conv2d(3, 4, 3), Residual(dropout), Residual(dropout)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def images(samples: int = 16) -> Rows:
    """Random images of 3 classes."""
    generator = torch.Generator().manual_seed(0)
    return Rows(
        torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(3, (samples,), generator=generator)
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    """Two blocks, with embedding and head tied."""

    def __init__(self, width: int = 16, depth: int = 2, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 61, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def token_loss(model, batch):
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return Loss(total, batch[:, 1:].numel())


def image_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def pair_loss(model, batch):
    """Every sample against every other: m x m."""
    features = F.normalize(model(batch[0]))
    return F.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


def adamw(parameters, learning_rate):
    return torch.optim.AdamW(parameters, lr=learning_rate)


def sgd(parameters, learning_rate):
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 5))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def make(model, *, data=None, loss=image_loss, optimizer=adamw) -> Workload:
    return Workload(
        model=model, train_data=data or IMAGES, loss=loss, optimizer=optimizer, learning_rate=1e-3
    )


WORKLOADS = {
    "perceptron": lambda: make(perceptron),
    "convolutions": lambda: make(convolutions, optimizer=sgd),
    "transformer": lambda: make(Transformer, data=TOKENS, loss=token_loss),
    "recomputed": lambda: make(lambda: Transformer(recompute=True), data=TOKENS, loss=token_loss),
}


def deep_transformer() -> Workload:
    """Return a workload whose activations take most of the memory."""
    return make(lambda: Transformer(depth=3), data=TOKENS, loss=token_loss)


def setup(workload: Workload, *, budget: int = GiB, **fields: Any) -> Setup:
    """Return a setup on the CPU under a budget, with a clipped gradient."""
    device = CpuDevice(memory_budget=budget, memory=HostMemory(8 * GiB, 8 * GiB, "made up"))
    return make_setup(workload, device=device, **{"max_grad_norm": 1.0, **fields})


def traced_step(
    of: Setup, *, capability: tuple[int, int] | None = None, steps: Sequence[int] = (1, 2), **fields: Any
) -> TracedStep:
    """Return what traces the steps of a setup on fakes; None for the operators of the CPU."""
    return TracedStep(
        workload=of.workload,
        model=of.model,
        batch_of=of.worst_case.batch,
        precision=of.precision,
        capability=capability,
        steps=steps,
        max_grad_norm=of.max_grad_norm,
        ema=of.ema,
        **fields,
    )
