"""The choice of the engine: reduce during the last backward pass, or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from autobatch.core.errors import InputError
from autobatch.core.units import format_bytes
from autobatch.distributed.after import After
from autobatch.distributed.group import Group
from autobatch.distributed.overlap import Overlap
from autobatch.distributed.shares import RankSplit
from autobatch.step.gradients import EXCHANGE_BYTES, LOW_PRECISION
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.rng import preserved_random_state

GradSync = Literal["auto", "overlap", "after"]
SENDERS = ("cpu",)
"""Devices that reduce gradients by the cores that compute them, so that a backward pass hides nothing."""
Spare = Callable[[], tuple[Collated, int]]


class Choice(NamedTuple):
    """An engine, and the reason for it in words."""

    engine: After | Overlap
    reason: str


def choose_engine(
    group: Group,
    split: RankSplit,
    kinds: list[int],
    train_state: TrainState,
    *,
    spare: Spare,
    asked: GradSync,
) -> Choice:
    """Choose the engine of a loop; all ranks call it, and make the same choice.

    Args:
        group: the ranks.
        split: the split of this rank.
        kinds: the kind of each rank.
        train_state: what trains; it is left unchanged.
        spare: returns a small micro-batch on the device, with its samples.
        asked: the engine that the user asked for.

    Raises:
        InputError: DDP was asked for, and cannot sum these gradients.
    """
    tensors = group.tensor_group(train_state.device)
    nbytes = sum(p.numel() * p.element_size() for p in train_state.parameters if p.requires_grad)
    reason = None
    if nbytes <= EXCHANGE_BYTES:
        reason = f"the gradients of {format_bytes(nbytes)} fit in one reduction"
    elif train_state.device.type in SENDERS:
        reason = "the cores that would hide the reduction carry it out"
    obstacle = None
    if asked == "overlap" or (asked == "auto" and reason is None):
        found = [one for one in group.gather(_obstacle(train_state, spare)) if one is not None]
        obstacle = found[0] if found else None
    if asked == "overlap" and obstacle is not None:
        raise InputError(f"--grad-sync overlap is not possible: {obstacle}. Use --grad-sync after")
    if asked == "after" or (asked == "auto" and reason is not None) or obstacle is not None:
        why = obstacle or ("as asked" if asked == "after" else reason)
        assert why is not None
        after = After(group, split, kinds, tensors)
        after.attach(train_state, spare)
        return Choice(after, why)
    engine = Overlap(group, split, kinds, tensors)
    engine.attach(train_state, spare)
    return Choice(engine, "as asked" if asked == "overlap" else "the last backward pass hides the reduction")


def _obstacle(train_state: TrainState, spare: Spare) -> str | None:
    """Return why DDP cannot sum the gradients of this rank; None if it can."""
    if isinstance(train_state.loss, WholeBatchLoss):
        return "the loss sees the whole batch, and DDP sums the gradients of parts"
    if any(parameter.dtype in LOW_PRECISION for parameter in train_state.parameters):
        return "16-bit gradients are summed in float32, and DDP's buckets have 16 bits"
    if train_state.gradients.are_overwritten:
        return "the gradients of CUDA graphs are copied, and DDP would sum them before"
    return _odd_gradient(train_state, spare)


def _odd_gradient(train_state: TrainState, spare: Spare) -> str | None:
    """Run a micro-batch forward and backward, and name a gradient that DDP's buckets cannot hold."""
    model = train_state.model
    model.train()
    train_state.buffers.take()
    try:
        with preserved_random_state():
            batch, _ = spare()
            with precision_context(train_state.device, train_state.precision):
                loss = train_state.loss(model, batch)
            total = loss.total if isinstance(loss, Loss) else loss
            if total.requires_grad:
                torch.autograd.backward(total)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                return f"parameter {name} got no gradient from a micro-batch, and DDP waits for all of them"
            if parameter.grad is not None and parameter.grad.is_sparse:
                return f"the gradient of {name} is sparse, and DDP's buckets are dense"
        return None
    finally:
        train_state.gradients.clear()
        train_state.buffers.restore()
