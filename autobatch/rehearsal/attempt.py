"""Attempts: real training steps that show whether a micro-batch fits.

An attempt trains copies of the model's tensors on the most expensive samples, with clipping and loss scale.
The optimizer's state appears in the first step, and two more steps of two micro-batches run in the steady
state. This module knows no device by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.records import Attempt
from autobatch.device.trace import Trace
from autobatch.rehearsal.rehearsal import Batch, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.step.train_step import StepResult
from autobatch.step.whole_batch import batch_samples

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
