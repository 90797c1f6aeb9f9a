"""Attempts: real training steps that show whether a micro-batch fits.

An attempt trains copies of the model's tensors on the most expensive samples, with clipping and loss scale.
The optimizer's state appears in the first step, and two more steps of two micro-batches run in the steady
state. This module knows no device by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch

from autobatch.core.errors import InputError
from autobatch.core.records import Attempt
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.allocator.trace import Trace
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line, requested_bytes
from autobatch.setup.rehearsal import batches_of, on_copies, step_anyway
from autobatch.setup.setup import Setup
from autobatch.step.train_step import StepResult, train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.rng import preserved_random_state

ATTEMPT_STEPS = (1, 2, 2)
"""Micro-batches of each step of an attempt. Adam's state appears in the first step, and ``.grad`` is resident
while the second micro-batch of a later one runs."""
OTHER_ATTEMPT_STEPS = (2, 2, 1)
"""Micro-batches of each step when an attempt near the limit of a caching allocator is repeated. A first step
of several micro-batches fragments the memory in another way, so that a size may fit in one order only."""
UNKNOWN_STATS = MemoryStats(None, None, None, None, None)
NEAR_THE_LIMIT = 0.75
"""Share of the budget above which an attempt is repeated in the other order."""


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
    seconds = first.attempt.seconds + second.attempt.seconds
    worse = msgspec.structs.replace(worse, seconds=seconds)
    return Outcome(worse, first.trace, second.trace, second.requested_bytes, second.is_context_lost)


def _run_steps(setup: Setup, micro_batch: int, steps: Sequence[int]) -> Outcome:
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
    setup: Setup, micro_batch: int, max_size: float | None, *, in_one_order: bool = False
) -> Outcome:
    """Make an attempt on the costliest samples of at most ``max_size``; None for no limit.

    It runs in one order if being near the limit is enough.
    """
    if max_size is not None:
        setup = replace(setup, worst_case=setup.worst_case.limited_to(max_size))
    return _run_steps(setup, micro_batch, ATTEMPT_STEPS) if in_one_order else attempt(setup, micro_batch)


def _train_on_copies(
    setup: Setup, micro_batch: int, meter: Meter, mark: Callable[[str], None], steps: Sequence[int]
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
