"""Attempts: real training steps that show whether a micro-batch fits.

An attempt trains copies of the model's tensors on the most expensive samples, with clipping and loss scale.
The optimizer's state appears in the first step, and two more steps of two micro-batches run in the steady
state. This module knows no device by name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.knobs import Value
from autobatch.core.records import Attempt, GradientDtype, Precision
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.allocator.trace import Trace
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line, requested_bytes
from autobatch.step.apply_knobs import free_graphs, uses_graphs
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.step.train_step import StepResult, train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.nested import Kept, feed
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

if TYPE_CHECKING:
    from autobatch.distributed.sharding.layout import ShardLayout
    from autobatch.distributed.sharding.model import Sharding

ATTEMPT_STEPS = (1, 2, 2)
"""Micro-batches of each step of an attempt. Adam's state appears in the first step, and ``.grad`` is resident
while the second micro-batch of a later one runs."""
OTHER_ATTEMPT_STEPS = (2, 2, 1)
"""Micro-batches of each step when an attempt near the limit of a caching allocator is repeated. A first step
of several micro-batches fragments the memory in another way, so that a size may fit in one order only."""
UNKNOWN_STATS = MemoryStats(None, None, None, None, None)
NEAR_THE_LIMIT = 0.75
"""Share of the budget above which an attempt is repeated in the other order."""


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """Model, data and device of attempts and trials, each of which leaves them unchanged."""

    workload: Workload
    model: nn.Module
    device: Device
    worst_case: WorstCaseSampler
    stream: Any = None
    """The user's stream, of which the workload has the first samples; None for data with an index."""
    precision: Precision
    gradient_dtype: GradientDtype = "fp32"
    max_grad_norm: float | None = None
    ema: float | None = None
    """Decay of the averaged weights; None for no average."""
    knobs: Mapping[str, Value] = field(default_factory=dict)
    """Values of the knobs that are not at their default."""
    whole_batch: int | None = None
    """Samples of an optimizer step if the loss sees all of them (`WholeBatchLoss`); None if it does not, or
    if they are unknown."""
    keeps_batches: bool = False
    """True for a loop that keeps each micro-batch until the next one is there."""
    world: int = 1
    """Ranks that train together; several hold a buffer in which they sum their gradients."""
    sharding: Sharding | None = None
    """The parts of a rank without the others; None if each rank has a whole model, or to train."""
    layout: ShardLayout | None = None
    """What ranks gather and reduce of a model that they share; None if each has a whole one."""
    clock: Callable[[], float] = time.perf_counter


class Outcome(NamedTuple):
    """An attempt and its allocation events."""

    attempt: Attempt
    trace: Trace | None
    """Its events, up to the request that failed; None if the device records none."""
    other: Trace | None = None
    """Events of the repetition in the other order; None if there was none, or none are recorded."""
    requested_bytes: int | None = None
    """About the bytes of the request that failed; None if none did, or if they are unknown."""
    is_context_lost: bool = False
    """True if the memory ran out in a way after which the process should be replaced."""
    error: Exception | None = None
    """What it failed with, if not for want of memory."""


def attempt(setup: TrainSetup, micro_batch: int) -> Outcome:
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
    seconds = first.attempt.seconds + second.attempt.seconds
    worse = msgspec.structs.replace(worse, seconds=seconds)
    return Outcome(worse, first.trace, second.trace, second.requested_bytes, second.is_context_lost)


def _run_steps(setup: TrainSetup, micro_batch: int, steps: Sequence[int]) -> Outcome:
    """Run the steps of an attempt with an empty cache; ``steps`` counts the micro-batches of each."""
    failure: tuple[Verdict, str, int | None] | None = None
    step_seconds: float | None = None
    phase = "setup"
    start = setup.clock()
    with preserved_random_state(), setup.device.enforced() as meter:

        def mark(name: str) -> None:
            nonlocal phase
            phase = name
            meter.mark(name)

        try:
            mark("setup")
            step_seconds = _train_on_copies(setup, micro_batch, meter, mark, steps)
        except Exception as error:
            verdict = classify(error)
            if verdict is Verdict.NONE or (verdict is Verdict.SUSPECT and micro_batch == 1):
                raise
            failure = (verdict, first_line(error), requested_bytes(error))
        # Outside the except block, nothing keeps the failed step's tensors alive.
        is_lost = failure is not None and failure[0] is Verdict.FATAL
        # A lost context answers no question.
        stats = UNKNOWN_STATS if is_lost else meter.stats()
        trace = None if is_lost else meter.trace()
    if failure is not None and not is_lost:
        setup.device.release()
    reason = failure[1] if failure is not None else setup.device.refuses(stats)
    return Outcome(
        Attempt(
            micro_batch=micro_batch,
            fits=reason is None,
            peak_allocated_bytes=stats.peak_allocated_bytes,
            peak_reserved_bytes=stats.peak_reserved_bytes,
            seconds=setup.clock() - start,
            step_seconds=step_seconds,
            reason=reason,
            phase=phase if failure is not None else None,
            is_below_budget=failure is not None and _is_below_budget(setup.device, stats, failure[2]),
        ),
        trace,
        requested_bytes=None if failure is None else failure[2],
        is_context_lost=is_lost,
    )


def _is_below_budget(device: Device, stats: MemoryStats, requested: int | None) -> bool:
    """Return whether a request failed although all that was held and the request are below the budget."""
    config = device.allocator_config
    held = stats.peak_allocated_bytes if config is None else stats.peak_reserved_bytes
    if held is None or requested is None:
        return False
    # An allocator takes whole segments.
    segment = 0 if config is None else config.large_segment_bytes
    return held + max(requested + segment // 8, segment) < device.budget_bytes


def attempt_at(
    setup: TrainSetup, micro_batch: int, max_size: float | None, *, in_one_order: bool = False
) -> Outcome:
    """Make an attempt on the costliest samples of at most ``max_size``; None for no limit.

    It runs in one order if being near the limit is enough.
    """
    if max_size is not None:
        setup = replace(setup, worst_case=setup.worst_case.limited_to(max_size))
    return _run_steps(setup, micro_batch, ATTEMPT_STEPS) if in_one_order else attempt(setup, micro_batch)


def _train_on_copies(
    setup: TrainSetup, micro_batch: int, meter: Meter, mark: Callable[[str], None], steps: Sequence[int]
) -> float:
    """Run the steps of an attempt on copies of the model's tensors, and return the seconds of the last.

    Args:
        setup: the model and the data.
        micro_batch: samples of each micro-batch.
        meter: counts the memory.
        mark: receives the name of each phase as it begins.
        steps: micro-batches of each step.
    """
    device = setup.device.torch_device
    with on_copies(setup, meter) as train_state:
        if train_state.scaler is not None:
            # The usual scale of 65536 may overflow in every step, and the optimizers' state never appears.
            train_state.scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        for number, count in enumerate(steps):
            start = setup.clock()
            costliest = ((setup.worst_case.batch(micro_batch), micro_batch) for _ in range(count))
            samples = batch_samples(setup.whole_batch, micro_batch, count)
            result = train_step(
                train_state,
                train_state.passing(batches_of(setup, meter, costliest), count),
                samples,
                mark=mark,
            )
            if number == 0:
                # Values of a shared model are not its own here.
                if train_state.shared is None:
                    _check_first(result, micro_batch, scaled=train_state.scaler is not None)
                if not result.applied:
                    step_anyway(train_state, mark)
        setup.device.synchronize()
        seconds = setup.clock() - start
        del train_state
    return seconds


@contextmanager
def on_copies(setup: TrainSetup, meter: Meter, *, learning_rate: float | None = None) -> Iterator[TrainState]:
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


def open_train_state(setup: TrainSetup, meter: Meter, *, learning_rate: float | None = None) -> TrainState:
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
    setup: TrainSetup, meter: Meter, fetched: Iterable[tuple[Collated, int]]
) -> Iterable[tuple[Collated, int]]:
    """Move micro-batches to the setup's device; a `WholeBatchLoss` reads each of them twice."""
    twice = isinstance(setup.workload.loss, WholeBatchLoss)
    placed = feed(fetched, setup.device.torch_device, meter, twice=twice)
    return Kept(placed) if setup.keeps_batches and not twice else placed


def _check_first(result: StepResult, micro_batch: int, *, scaled: bool) -> None:
    """Raise if the loss or the gradient of the first step is not finite."""
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    # A scaled gradient may overflow in a sound run, which lowers its scale then.
    if result.count and not result.applied and not (scaled and what == "gradient"):
        found = result.loss if what == "loss" else result.grad_norm
        raise InputError(
            f"the workload's {what} is {found} on its first micro-batch of {micro_batch} but must be finite: "
            "check the data, the loss and the learning rate"
        )


def step_anyway(train_state: TrainState, mark: Callable[[str], None]) -> None:
    """Make the optimizers' state appear although a step without counted items, or an overflow, skipped it."""
    mark("optimizer")
    for parameter in train_state.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with user_code("optimizer"):
        for optimizer in train_state.optimizers:
            optimizer.step()
    train_state.gradients.clear()
