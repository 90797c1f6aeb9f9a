"""Loss whose gradient overflows for chosen samples."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.support.training import Rows, mean_loss, points


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


def loss(model: nn.Module, batch) -> torch.Tensor:
    inputs, labels, bad = batch
    return Overflow.apply(mean_loss(model, (inputs, labels)), bad)
