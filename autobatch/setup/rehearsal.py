"""Steps that are thrown away: real training on copies of the model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from autobatch.device.base import Meter
from autobatch.setup.setup import Setup
from autobatch.step.apply_knobs import free_graphs, uses_graphs
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.nested import Kept, feed
from autobatch.workload.user_code import user_code


@contextmanager
def on_copies(setup: Setup, meter: Meter, *, learning_rate: float | None = None) -> Iterator[TrainState]:
    """Return a train state on copies of the model's tensors, which live within the block.

    Of a model that ranks share, the copies are the parts of one rank, with values of their own.

    Args:
        setup: the model and its optimizer.
        meter: counts the copies.
        learning_rate: None for the workload's own.
    """
    if setup.sharding is None:
        try:
            with temporary_weights(setup.model, setup.device.torch_device):
                yield open_train_state(setup, meter, learning_rate=learning_rate)
        finally:
            if uses_graphs(setup.knobs):
                free_graphs()
        return
    # Importing FSDP takes a second, which a run without it saves.
    from autobatch.distributed.sharding.one_rank import sharded_copy

    with meter.uncounted():
        model, shared = sharded_copy(setup.model, setup.sharding, setup.precision, setup.device.torch_device)
    train_state = open_train_state(replace(setup, model=model), meter, learning_rate=learning_rate)
    shared.attach(train_state)
    yield train_state


def open_train_state(setup: Setup, meter: Meter, *, learning_rate: float | None = None) -> TrainState:
    """Build the train state of a setup whose model is on temporary weights.

    Args:
        setup: the model and its optimizer.
        meter: counts the model's tensors from here on.
        learning_rate: None for the workload's own.
    """
    meter.count(tensor.data for tensor in [*setup.model.parameters(), *setup.model.buffers()])
    setup.model.train()
    return build_train_state(
        setup.workload,
        setup.model,
        setup.device.torch_device,
        StepSettings(
            precision=setup.precision,
            gradient_dtype=setup.gradient_dtype,
            max_grad_norm=setup.max_grad_norm,
            ema=setup.ema,
            knobs=setup.knobs,
            # Ranks that share a model need no buffer: FSDP sums their gradients.
            world=1 if setup.sharding else setup.world,
        ),
        learning_rate=setup.workload.learning_rate if learning_rate is None else learning_rate,
    )


def batches_of(
    setup: Setup, meter: Meter, fetched: Iterable[tuple[Collated, int]]
) -> Iterable[tuple[Collated, int]]:
    """Move micro-batches to the setup's device; a `WholeBatchLoss` reads each of them twice."""
    twice = isinstance(setup.workload.loss, WholeBatchLoss)
    placed = feed(fetched, setup.device.torch_device, meter, twice=twice)
    return Kept(placed) if setup.keeps_batches and not twice else placed


def step_anyway(train_state: TrainState, mark: Callable[[str], None]) -> None:
    """Make the optimizers' state appear although a step without counted items, or an overflow, skipped it."""
    mark("optimizer")
    for parameter in train_state.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with user_code("optimizer"):
        for optimizer in train_state.optimizers:
            optimizer.step()
    train_state.gradients.clear()
