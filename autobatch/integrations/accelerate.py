"""Hugging Face ``accelerate``: plan for an ``Accelerator``, and set its accumulation.

    accelerator = Accelerator()
    plan = autobatch.integrations.accelerate.plan(
        accelerator, model, optimizer, loader, loss=loss, target_batch=16
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, plan.loader)

``plan.loader`` is the same loader with the planned batch size. The loop stays as it is:

    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()

Its loop is less exact than autobatch, as the notes of the plan and ``docs/loops.md`` say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.core.keywords import Keywords
from autobatch.integrations.kept_state import kept_state
from autobatch.integrations.library_plan import (
    Float32Outputs,
    LibraryLoop,
    LibraryPlan,
    check_resizable,
    drops_last,
    on_host,
    plan_for,
    precision_of,
    rebuilt,
    resized,
)
from autobatch.workload.contract import Collated, Loss, Workload, check_loss
from autobatch.workload.user_code import check_takes

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
) -> LibraryPlan:
    """Plan for an ``Accelerator``, set its accumulation steps, and make a loader of the planned batch size.

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
    check_loss(loss, "accelerate.plan(loss=…)")
    check_takes(loss, "accelerate.plan(loss=…)", "model", "batch")
    check_resizable(loader, before="accelerator.prepare")
    precisions = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    options.setdefault("precision", precision_of(accelerator.mixed_precision, precisions, "accelerate"))
    loop = LibraryLoop(
        name="accelerate",
        world_size=accelerator.num_processes,
        device=accelerator.device,
        divides_by_plan=True,
        drop_last=drops_last(loader),
    )
    is_mixed = accelerator.mixed_precision != "no"
    own = model  # the workload's functions name their arguments
    workload = Workload.from_loader(
        loader,
        model=lambda: own,
        loss=lambda copy, batch: loss(Float32Outputs(copy) if is_mixed else copy, batch),
        optimizer=lambda model, _: rebuilt(optimizer, own, model),
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        name=type(model).__name__,
    )
    with on_host(model), kept_state(model, loss):
        made = plan_for(workload, loop, target_batch, loader=partial(resized, loader), **options)
    accelerator.gradient_accumulation_steps = made.accumulation_steps
    _hold_to_plan(accelerator, loader, made)
    return made


def _hold_to_plan(accelerator: Any, loader: DataLoader[Any], plan: LibraryPlan) -> None:
    """Let ``prepare`` refuse the loader of another batch size, and ``load_state`` begin with a whole step."""
    prepare, load = accelerator.prepare_data_loader, accelerator.load_state

    def prepare_data_loader(given: Any, *args: Any, **more: Any) -> Any:
        if given is loader and loader.batch_size != plan.micro_batch:
            raise InputError(
                f"the plan is for micro-batches of {plan.micro_batch} samples, and this loader makes batches "
                f"of {loader.batch_size}: give plan.loader to prepare"
            )
        return prepare(given, *args, **more)

    def load_state(*args: Any, **more: Any) -> None:
        load(*args, **more)
        accelerator.step = 0  # that of the checkpoint counts micro-batches of another plan

    accelerator.prepare_data_loader, accelerator.load_state = prepare_data_loader, load_state
