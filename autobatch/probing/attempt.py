"""One attempt: does a micro-batch fit?

An attempt is real training on copies of the model's tensors: one window in which the optimizer's state
appears, then two windows of two micro-batches each in the steady state, with clipping and loss scale, on the
worst_case samples. No device is known by name here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.knobs import Value
from autobatch.core.records import Attempt, Precision
from autobatch.device.allocator.trace import Trace
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import TrainState, build_train_state
from autobatch.step.train_step import StepResult, train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.nested import feed
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

ATTEMPT_STEPS = (1, 2, 2)
"""Micro-batches a window of an attempt: state appears, then the steady state twice (Adam's state comes with
the first step, ``.grad`` is resident while the second micro-batch runs)."""
OTHER_ATTEMPT_STEPS = (2, 2, 1)
"""… and of the second look where the allocator caches: a first window of several micro-batches leaves its
memory in other pieces, and a size at the very limit may fit in one order and not in the other."""
NEAR_THE_LIMIT = 0.75
"""Share of the budget from which on the second look is taken."""


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """What attempts and trials run on; built once, lent to each."""

    workload: Workload
    model: nn.Module
    device: Device
    worst_case: WorstCaseSampler
    precision: Precision
    max_grad_norm: float | None = None
    ema: float | None = None
    """Decay of the weights' average; ``None``: none is kept."""
    knobs: Mapping[str, Value] = field(default_factory=dict)
    """What the tuner chose, by the knob's name."""
    whole_batch: int | None = None
    """Samples of an optimizer step, where the loss sees all of them (`WholeBatchLoss`) and they are known."""
    clock: Callable[[], float] = time.perf_counter


class Outcome(NamedTuple):
    """An attempt, and its allocation events where the device records them and the windows ran."""

    attempt: Attempt
    trace: Trace | None
    other: Trace | None = None
    """Of the second look, where one was taken and its windows ran."""


def attempt(setup: TrainSetup, micro_batch: int) -> Outcome:
    """Train a few windows at a micro-batch, inside the budget, and put everything back.

    Raises:
        InputError: the loss or its gradient is not finite.
        Exception: whatever the workload raises that is no out-of-memory error, untouched.
    """
    first = _session(setup, micro_batch, ATTEMPT_STEPS)
    reserved = first.attempt.peak_reserved_bytes
    if not first.attempt.fits or (reserved or 0) < NEAR_THE_LIMIT * setup.device.budget_bytes:
        return first
    second = _session(setup, micro_batch, OTHER_ATTEMPT_STEPS)
    told = first.attempt if second.attempt.fits else second.attempt
    seconds = first.attempt.seconds + second.attempt.seconds
    return Outcome(msgspec.structs.replace(told, seconds=seconds), first.trace, second.trace)


def _session(setup: TrainSetup, micro_batch: int, steps: Sequence[int]) -> Outcome:
    """Windows of so many micro-batches each, from nothing cached."""
    failure: tuple[Verdict, str] | None = None
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
            step_seconds = train_on_copies(setup, micro_batch, meter, mark, steps)
        except Exception as error:
            verdict = classify(error)
            if verdict is Verdict.NONE or (verdict is Verdict.SUSPECT and micro_batch == 1):
                raise
            failure = (verdict, first_line(error))
        # The except block is left: nothing keeps the failed step's tensors alive any more.
        stats = meter.stats()
        trace = meter.trace() if failure is None else None
    if failure is not None:
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
        ),
        trace,
    )


def attempt_at(setup: TrainSetup, micro_batch: int, max_size: float | None) -> Outcome:
    """Make an attempt on the costliest samples of at most ``max_size``; None for no limit."""
    if max_size is None:
        return attempt(setup, micro_batch)
    return attempt(replace(setup, worst_case=setup.worst_case.limited_to(max_size)), micro_batch)


def train_on_copies(
    setup: TrainSetup, micro_batch: int, meter: Meter, mark: Callable[[str], None], steps: Sequence[int]
) -> float:
    """Run the windows of an attempt; the model is lent, its own tensors come back.

    Returns:
        Seconds of the last window.
    """
    device = setup.device.torch_device
    with temporary_weights(setup.model, device):
        train_state = open_train_state(setup, meter)
        if train_state.scaler is not None:
            # From the usual 65536 the first windows may overflow, and the optimizers' state never appears.
            train_state.scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        for number, count in enumerate(steps):
            start = setup.clock()
            worst_case = ((setup.worst_case.batch(micro_batch), micro_batch) for _ in range(count))
            batches = batches_of(setup, meter, worst_case)
            samples = batch_samples(setup.whole_batch, micro_batch, count)
            result = train_step(train_state, batches, samples, mark=mark)
            if number == 0:
                _check_first(result, micro_batch, scaled=train_state.scaler is not None)
                if not result.applied:
                    _step_anyway(train_state, mark)
        setup.device.synchronize()
        seconds = setup.clock() - start
        del train_state
    return seconds


def open_train_state(setup: TrainSetup, meter: Meter, *, learning_rate: float | None = None) -> TrainState:
    """The bench's model, lent already, with what trains it; ``learning_rate`` in place of the workload's."""
    meter.count(tensor.data for tensor in [*setup.model.parameters(), *setup.model.buffers()])
    setup.model.train()
    return build_train_state(
        setup.workload,
        setup.model,
        setup.device.torch_device,
        precision=setup.precision,
        learning_rate=setup.workload.learning_rate if learning_rate is None else learning_rate,
        max_grad_norm=setup.max_grad_norm,
        ema=setup.ema,
        knobs=setup.knobs,
    )


def batches_of(
    setup: TrainSetup, meter: Meter, fetched: Iterable[tuple[Collated, int]]
) -> Iterable[tuple[Collated, int]]:
    """Bring micro-batches to the bench's device in the way that its loss needs."""
    twice = isinstance(setup.workload.loss, WholeBatchLoss)
    return feed(fetched, setup.device.torch_device, meter, twice=twice)


def _check_first(result: StepResult, micro_batch: int, *, scaled: bool) -> None:
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    # A scaled gradient may overflow in a run that is sound: the scale is lowered then.
    if result.count and not result.applied and not (scaled and what == "gradient"):
        found = result.loss if what == "loss" else result.grad_norm
        raise InputError(
            f"the workload's {what} is {found} on its first micro-batch of {micro_batch}: it must be "
            "finite; look at the data, the loss and the learning rate"
        )


def _step_anyway(train_state: TrainState, mark: Callable[[str], None]) -> None:
    """Let the optimizers' state appear where nothing counted or a scale overflowed: it will, some window."""
    mark("optimizer")
    for parameter in train_state.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with user_code("optimizer"):
        for optimizer in train_state.optimizers:
            optimizer.step()
    train_state.gradients.clear()
