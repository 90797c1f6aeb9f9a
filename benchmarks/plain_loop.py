"""A loop of torch as people write it, on the costliest samples: the truth about what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

STEPS = ((1, 2, 2), (2, 2, 1))
"""Micro-batches of each optimizer step. The order of the first two changes how memory fragments."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def costliest(workload: Any, size: int) -> Any:
    """Return the largest samples, as many as asked for, joined to a micro-batch."""
    data = workload.train_data
    order: Any = range(len(data))
    if workload.size_of is not None:
        order = sorted(order, key=lambda index: (-workload.size_of(data[index]), index))
    collate = workload.collate or torch.utils.data.default_collate
    return collate([data[index] for index in order[:size]])


def train(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module, Any], Any],
    draw: Callable[[], Any],
    steps: tuple[int, ...],
    *,
    device_type: str,
    precision: str = "fp32",
) -> None:
    """Run optimizer steps of so many micro-batches each.

    Args:
        model: on its device.
        optimizer: of its parameters.
        loss_of: returns the loss of a micro-batch, or an object that has it as ``total``.
        draw: returns a micro-batch on the device, which nothing else holds.
        steps: micro-batches of each step.
        device_type: of the model.
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    scaler = torch.amp.GradScaler(device_type, init_scale=1.0, enabled=precision == "fp16")
    for count in steps:
        for _ in range(count):
            batch = draw()
            with torch.autocast(device_type, DTYPES.get(precision), enabled=precision in DTYPES):
                loss = loss_of(model, batch)
            del batch  # autograd keeps what it needs
            total = getattr(loss, "total", loss) / count
            del loss
            scaler.scale(total).backward()
            del total
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
