"""Loss whose gradient overflows for chosen samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from autobatch.training.loop import Loop
from tests.support.training import Rows, make_loop, make_workload, mean_loss, network, points


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


TARGET = 8


def fp16_loop(data: Rows, *, ema: float | None = None, **changes: Any) -> Loop:
    """Make a loop of four fp16 steps, whose schedule halves the learning rate after each."""
    workload = make_workload(
        **{
            "model": lambda: network(torch.float32),
            "train_data": data,
            "loss": loss,
            "schedule": lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
            **changes,
        }
    )
    return make_loop(workload, target_batch=TARGET, micro_batch=2, steps=4, precision="fp16", ema=ema)


def batch_ids(loop: Loop, index: int) -> list[int]:
    """Return the samples of a batch."""
    return next(loop.sampler.batches(index)).ids
