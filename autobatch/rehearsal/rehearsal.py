"""Rehearsals: optimizer steps on copies of the model's tensors, which leave nothing behind.

An attempt, a run of real batches, a timed trial, a check of losses and a short run of a learning rate differ
only in their batches, and in what they read of the steps. This module knows no device by name.

An attempt shows whether a micro-batch fits: it trains on the most expensive samples, with clipping and loss
scale. The optimizer's state appears in the first step, and two more steps of two micro-batches run in the
steady state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.records import COMPILE, Attempt
from autobatch.device.allocator import MemoryStats
from autobatch.device.base import Meter, followed_modules
from autobatch.device.oom import Verdict, classify, first_line, is_below_budget, requested_bytes
from autobatch.device.trace import Trace
from autobatch.rehearsal.setup import Setup
from autobatch.step.gradients import parameters_of
from autobatch.step.restore import temporary_state, temporary_weights
from autobatch.step.train_state import TrainState, build_train_state
from autobatch.step.train_step import StepResult, accumulate, finish
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import held
from autobatch.workload.order import MicroBatchIds
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code


@dataclass(frozen=True)
class Batch:
    """Batch of a rehearsal."""

    micro_batches: Iterable[tuple[Collated, int]]
    """Each on the host, with its number of samples; made when it is needed, and freed after its use."""
    count: int
    """Number of micro-batches."""
    samples: int
    """Samples of the batch, which may be more than those of its micro-batches."""


class Step(NamedTuple):
    """Optimizer step of a rehearsal."""

    result: StepResult
    micro_seconds: float
    """Of a micro-batch: fetch, collate, forward and backward."""
    once_seconds: float
    """Once per step: check of the gradients, clipping, the optimizer."""
    has_gradient: bool
    """False if the loss trains on none of the samples."""


@dataclass
class Rehearsal:
    """Findings of a rehearsal."""

    steps: list[Step] = field(default_factory=list)
    reason: str | None = None
    """Reason why it does not fit; None if it does."""
    phase: str | None = None
    """Phase in which memory ran out; see `Meter.mark`. None if it did not."""
    is_below_budget: bool = False
    """True if something else than the budget refused memory."""
    stats: MemoryStats = field(default_factory=MemoryStats)
    trace: Trace | None = None
    """Allocation events, up to the request that failed; None if the device records none."""


def rehearse(
    setup: Setup,
    batches: Iterable[Batch],
    *,
    within_budget: bool = False,
    is_smallest: bool = False,
    learning_rate: float | None = None,
) -> Rehearsal:
    """Train on batches, and leave the weights, the buffers, the random states, the modes and the gradients.

    Args:
        setup: the model, the data and the device.
        batches: read one at a time, each after the step before it.
        within_budget: start with an empty cache, enforce the budget, and let the optimizers' state appear in
            the first step whatever its loss; False to train at full speed.
        is_smallest: raise an error that only may be about memory, because no smaller size can tell.
        learning_rate: None for the workload's own.

    Raises:
        Exception: whatever the workload raises, except out of memory.
    """
    rehearsal, device, is_lost = Rehearsal(), setup.device, False
    with preserved_random_state(), device.session(is_probe=within_budget) as meter:
        try:
            meter.mark("setup")
            followed = within_budget and setup.sharding is None and setup.knobs.get(COMPILE, "off") == "off"
            with (
                on_copies(setup, meter, learning_rate=learning_rate) as train_state,
                followed_modules(setup.model, meter) if followed else nullcontext(),
            ):
                if within_budget and train_state.scaler.is_enabled():
                    # The usual scale of 65536 may overflow in every step, and no state appears.
                    train_state.scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=1.0)
                for batch in batches:
                    step = _take_step(setup, batch, train_state)
                    if within_budget and not rehearsal.steps and not step.result.applied:
                        _step_anyway(train_state)
                    rehearsal.steps.append(step)
                del train_state
        except Exception as error:
            verdict = classify(error)
            if verdict is Verdict.NONE or (verdict is Verdict.SUSPECT and is_smallest):
                raise
            is_lost = verdict is Verdict.FATAL
            rehearsal.reason, rehearsal.phase = first_line(error), meter.phase
            requested = requested_bytes(error)
        # Outside the except block, nothing keeps the failed step's tensors alive.
        if not is_lost:  # a lost context answers no question
            rehearsal.stats, rehearsal.trace = stats, _ = meter.stats(), meter.trace()
            if rehearsal.phase is not None:
                held = stats.peak_reserved_bytes or stats.peak_allocated_bytes
                rehearsal.is_below_budget = is_below_budget(held, requested, device.budget_bytes)
            elif within_budget:
                rehearsal.reason = device.refuses(stats)
    if rehearsal.phase is not None and not is_lost:
        device.release()
    return rehearsal


def batch_of(workload: Workload, parts: Sequence[MicroBatchIds]) -> Batch:
    """Return the batch of these samples, which are fetched as they are needed."""
    fetched = ((load_micro_batch(workload, part.ids), len(part.ids)) for part in parts)
    samples = sum(len(part.ids) for part in parts)
    return Batch(fetched, len(parts), samples)


@contextmanager
def on_copies(setup: Setup, meter: Meter, *, learning_rate: float | None = None) -> Iterator[TrainState]:
    """Return a train state on copies of the model's tensors, which live within the block.

    Of a model that ranks share, the copies are the parts of one rank, with values of their own.
    """
    device = setup.device.torch_device

    def build(model: nn.Module) -> TrainState:
        return build_train_state(setup.workload, model, device, setup, meter, learning_rate=learning_rate)

    if setup.sharding is None:
        with temporary_weights(setup.model, device):
            train_state = build(setup.model)
            with temporary_state(train_state.optimizers):
                yield train_state
        return
    # Importing FSDP takes a second, which a run without it saves.
    from autobatch.distributed.shard import sharded_copy

    with meter.uncounted():
        shared = sharded_copy(setup.model, setup.sharding, setup.precision, device)
    train_state = build(shared.model)
    shared.attach(train_state)
    yield train_state


def _step_anyway(train_state: TrainState) -> None:
    """Make the optimizers' state appear although a step without counted items, or an overflow, skipped it."""
    train_state.meter.mark("optimizer")
    for parameter in parameters_of(train_state.optimizers):
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with user_code("optimizer"):
        for optimizer in train_state.optimizers:
            optimizer.step()
    train_state.gradients.clear()


def _take_step(setup: Setup, batch: Batch, train_state: TrainState) -> Step:
    """Take one step of `rehearse`."""

    def now() -> float:
        setup.device.synchronize()
        return setup.clock()

    placed: Iterable[tuple[Collated, int]] = train_state.feed(batch.micro_batches)
    if setup.keeps_batches and not isinstance(setup.workload.loss, WholeBatchLoss):
        placed = held(placed)
    start = now()
    totals = accumulate(train_state, placed, batch.samples)
    accumulated = now()
    has_gradient = any(map(len, train_state.gradients.by_optimizer()))
    # ``placed`` is held here, and may keep the last micro-batch until the step ends.
    result = finish(train_state, totals)
    return Step(result, (accumulated - start) / batch.count, now() - accumulated, has_gradient)


ATTEMPT_STEPS = (1, 2, 2)
"""Micro-batches of each step of an attempt. Adam's state appears in the first step, and ``.grad`` is resident
while the second micro-batch of a later one runs."""
OTHER_ATTEMPT_STEPS = (2, 2, 1)
"""Micro-batches of each step when an attempt near the limit of a caching allocator is repeated. A first step
of several micro-batches fragments the memory in another way, so that a size may fit in one order only."""
NEAR_THE_LIMIT = 0.75
"""Share of the budget above which an attempt is repeated in the other order."""


class Outcome(NamedTuple):
    """An attempt and its allocation events."""

    attempt: Attempt
    trace: Trace | None
    """Its events, up to the request that failed; None if the device records none."""
    other: Trace | None = None
    """Events of the repetition in the other order; None if there was none, or none are recorded."""
    error: Exception | None = None
    """What it failed with, if not for want of memory."""


def attempt(setup: Setup, micro_batch: int) -> Outcome:
    """Train a few steps at a micro-batch within the budget, and leave the model unchanged.

    Raises:
        InputError: the loss or its gradient is not finite.
        Exception: whatever the workload raises, except out of memory.
    """
    first = _run_steps(setup, micro_batch, ATTEMPT_STEPS)
    reserved = first.attempt.peak_reserved_bytes
    if not first.attempt.fits or (reserved or 0) < NEAR_THE_LIMIT * setup.device.budget_bytes:
        return first
    second = _run_steps(setup, micro_batch, OTHER_ATTEMPT_STEPS)
    worse = first.attempt if second.attempt.fits else second.attempt
    worse = msgspec.structs.replace(worse, seconds=first.attempt.seconds + second.attempt.seconds)
    return Outcome(worse, first.trace, second.trace)


def _run_steps(setup: Setup, micro_batch: int, steps: Sequence[int]) -> Outcome:
    """Run the steps of an attempt; ``steps`` counts the micro-batches of each."""
    start = setup.clock()
    batches = (_costliest(setup, micro_batch, count) for count in steps)
    rehearsal = rehearse(setup, batches, within_budget=True, is_smallest=micro_batch == 1)
    if rehearsal.steps and not rehearsal.steps[0].has_gradient:
        raise InputError(
            f"the loss trains on none of the {micro_batch} costliest samples: give Workload(size_of=…), with "
            "which samples that it trains on come first"
        )
    # Values of a shared model are not its own here.
    if rehearsal.steps and setup.sharding is None:
        _check_first(rehearsal.steps[0].result, micro_batch)
    return Outcome(
        Attempt(
            micro_batch=micro_batch,
            fits=rehearsal.reason is None,
            peak_allocated_bytes=rehearsal.stats.peak_allocated_bytes,
            peak_reserved_bytes=rehearsal.stats.peak_reserved_bytes,
            seconds=setup.clock() - start,
            reason=rehearsal.reason,
            phase=rehearsal.phase,
            is_below_budget=rehearsal.is_below_budget,
        ),
        rehearsal.trace,
    )


def _costliest(setup: Setup, micro_batch: int, count: int) -> Batch:
    """Return a batch of ``count`` micro-batches of the most expensive samples."""
    costliest = ((setup.worst_case.batch(micro_batch), micro_batch) for _ in range(count))
    return Batch(costliest, count, batch_samples(setup.whole_batch, micro_batch, count))


def _check_first(result: StepResult, micro_batch: int) -> None:
    """Raise if the loss or the gradient of the first step is not finite."""
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    if result.count and not result.applied:
        value = result.loss if what == "loss" else result.grad_norm
        raise InputError(
            f"the workload's {what} is {value} on its first micro-batch of {micro_batch} but must be finite: "
            "check the data, the loss and the learning rate"
        )
