"""Hugging Face ``accelerate``: plan for an ``Accelerator``, and set its accumulation.

    from autobatch.integrations.accelerate import plan

    accelerator = Accelerator()
    print(plan(accelerator, model, optimizer, loader, loss=loss, target_batch=16))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The loader then has the planned batch size. The loop stays as it is:

    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()

Its loop is less exact than autobatch, as the notes of the plan and ``docs/loops.md`` say.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autobatch.core.options import Keywords
from autobatch.integrations.library_plan import (
    LibraryLoop,
    check_resizable,
    float32_outputs,
    on_host,
    plan_for,
    precision_of,
    rebuilt,
    resize,
)
from autobatch.report.result import PlanResult
from autobatch.workload.contract import Collated, Loss, Workload, refuse_loss_of_torch

__all__ = ["plan"]


def plan(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    loss: Callable[[Any, Collated], Tensor | Loss],
    target_batch: int,
    **options: Unpack[Keywords],
) -> PlanResult:
    """Plan for an ``Accelerator``, and set its accumulation steps and the batch size of the loader.

    Args:
        accelerator: whose device and precision are used.
        model: before ``prepare``.
        optimizer: before ``prepare``.
        loader: before ``prepare``; a ``DataLoader`` or torchdata's ``StatefulDataLoader``.
        loss: maps ``(model, batch)`` to the loss that the loop backpropagates.
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`, such as ``memory_budget``.

    Raises:
        InputError: an option is invalid, or the loader was prepared before or has a batch sampler of its own.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    refuse_loss_of_torch(loss, "accelerate.plan(loss=…)")
    check_resizable(loader)
    precisions = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    options.setdefault("precision", precision_of(accelerator.mixed_precision, precisions, "accelerate"))
    loop = LibraryLoop(name="accelerate", world_size=accelerator.num_processes, device=accelerator.device)

    def own_loss(model: nn.Module, batch: Collated) -> Tensor | Loss:
        with float32_outputs(model, accelerator):
            return loss(model, batch)

    with on_host(model):
        original, copied = model, copy.deepcopy(model)
        workload = Workload.from_loader(
            loader,
            model=lambda: copied,
            loss=own_loss,
            # The names of its arguments say what it takes.
            optimizer=lambda model, _: rebuilt(optimizer, original, model),
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            name=type(model).__name__,
        )
        made = plan_for(workload, loop, target_batch, **options)
    resize(loader, made.micro_batch)
    accelerator.gradient_accumulation_steps = made.accumulation_steps
    return made
