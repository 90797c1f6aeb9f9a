"""One attempt: does a micro-batch fit?

An attempt is real training on copies of the model's tensors: one window in which the optimizer's state
appears, then two windows of two micro-batches each in the steady state, with clipping and loss scale, on the
costliest samples. No device is known by name here.
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
from autobatch.step.restore import lent
from autobatch.step.train_state import Trainee, assemble
from autobatch.step.train_step import WindowResult, run_window
from autobatch.step.whole_batch import window_samples
from autobatch.workload.contract import Batch, WholeBatchLoss, Workload
from autobatch.workload.data import Costliest
from autobatch.workload.nested import feed
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

WINDOWS = (1, 2, 2)
"""Micro-batches a window of an attempt: state appears, then the steady state twice (Adam's state comes with
the first step, ``.grad`` is resident while the second micro-batch runs)."""


OTHER_WINDOWS = (2, 2, 1)
"""… and of the second look where the allocator caches: a first window of several micro-batches leaves its
memory in other pieces, and a size at the very limit may fit in one order and not in the other."""


NEAR_THE_LIMIT = 0.75
"""Share of the budget from which on the second look is taken."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What attempts and trials run on; built once, lent to each."""

    workload: Workload
    model: nn.Module
    device: Device
    costliest: Costliest
    precision: Precision
    max_grad_norm: float | None = None
    ema: float | None = None
    """Decay of the weights' average; ``None``: none is kept."""
    knobs: Mapping[str, Value] = field(default_factory=dict)
    """What the tuner chose, by the knob's name."""
    window: int | None = None
    """Samples of an optimizer step, where the loss sees all of them (`WholeBatchLoss`) and they are known."""
    clock: Callable[[], float] = time.perf_counter


class Outcome(NamedTuple):
    """An attempt, and its allocation events where the device records them and the windows ran."""

    attempt: Attempt
    trace: Trace | None
    other: Trace | None = None
    """Of the second look, where one was taken and its windows ran."""


def attempt(bench: Bench, micro_batch: int) -> Outcome:
    """Train a few windows at a micro-batch, inside the budget, and put everything back.

    Raises:
        InputError: the loss or its gradient is not finite.
        Exception: whatever the workload raises that is no out-of-memory error, untouched.
    """
    first = _session(bench, micro_batch, WINDOWS)
    reserved = first.attempt.peak_reserved_bytes
    if not first.attempt.fits or (reserved or 0) < NEAR_THE_LIMIT * bench.device.budget_bytes:
        return first
    second = _session(bench, micro_batch, OTHER_WINDOWS)
    told = first.attempt if second.attempt.fits else second.attempt
    seconds = first.attempt.seconds + second.attempt.seconds
    return Outcome(msgspec.structs.replace(told, seconds=seconds), first.trace, second.trace)


def _session(bench: Bench, micro_batch: int, windows: Sequence[int]) -> Outcome:
    """Windows of so many micro-batches each, from nothing cached."""
    failure: tuple[Verdict, str] | None = None
    window_seconds: float | None = None
    phase = "setup"
    start = bench.clock()
    with preserved_random_state(), bench.device.enforced() as meter:

        def mark(name: str) -> None:
            nonlocal phase
            phase = name
            meter.mark(name)

        try:
            mark("setup")
            window_seconds = train_on_copies(bench, micro_batch, meter, mark, windows)
        except Exception as error:
            verdict = classify(error)
            if verdict is Verdict.NONE or (verdict is Verdict.SUSPECT and micro_batch == 1):
                raise
            failure = (verdict, first_line(error))
        # The except block is left: nothing keeps the failed step's tensors alive any more.
        stats = meter.stats()
        trace = meter.trace() if failure is None else None
    if failure is not None:
        bench.device.release()
    reason = failure[1] if failure is not None else bench.device.refuses(stats)
    return Outcome(
        Attempt(
            micro_batch=micro_batch,
            fits=reason is None,
            peak_allocated_bytes=stats.peak_allocated_bytes,
            peak_reserved_bytes=stats.peak_reserved_bytes,
            seconds=bench.clock() - start,
            window_seconds=window_seconds,
            reason=reason,
            phase=phase if failure is not None else None,
        ),
        trace,
    )


def attempt_at(bench: Bench, micro_batch: int, level: float | None) -> Outcome:
    """An attempt on the costliest of the samples that cost no more than ``level``; of all, for ``None``."""
    if level is None:
        return attempt(bench, micro_batch)
    return attempt(replace(bench, costliest=bench.costliest.up_to(level)), micro_batch)


def train_on_copies(
    bench: Bench, micro_batch: int, meter: Meter, mark: Callable[[str], None], windows: Sequence[int]
) -> float:
    """Run the windows of an attempt; the model is lent, its own tensors come back.

    Returns:
        Seconds of the last window.
    """
    device = bench.device.torch_device
    with lent(bench.model, device):
        trainee = open_trainee(bench, meter)
        if trainee.scaler is not None:
            # From the usual 65536 the first windows may overflow, and the optimizers' state never appears.
            trainee.scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        for number, count in enumerate(windows):
            start = bench.clock()
            costliest = ((bench.costliest.batch(micro_batch), micro_batch) for _ in range(count))
            batches = batches_of(bench, meter, costliest)
            samples = window_samples(bench.window, micro_batch, count)
            result = run_window(trainee, batches, samples, mark=mark)
            if number == 0:
                _check_first(result, micro_batch, scaled=trainee.scaler is not None)
                if not result.applied:
                    _step_anyway(trainee, mark)
        bench.device.synchronize()
        seconds = bench.clock() - start
        del trainee
    return seconds


def open_trainee(bench: Bench, meter: Meter, *, learning_rate: float | None = None) -> Trainee:
    """The bench's model, lent already, with what trains it; ``learning_rate`` in place of the workload's."""
    meter.adopt(tensor.data for tensor in [*bench.model.parameters(), *bench.model.buffers()])
    bench.model.train()
    return assemble(
        bench.workload,
        bench.model,
        bench.device.torch_device,
        precision=bench.precision,
        learning_rate=bench.workload.learning_rate if learning_rate is None else learning_rate,
        max_grad_norm=bench.max_grad_norm,
        ema=bench.ema,
        knobs=bench.knobs,
    )


def batches_of(
    bench: Bench, meter: Meter, fetched: Iterable[tuple[Batch, int]]
) -> Iterable[tuple[Batch, int]]:
    """Bring micro-batches to the bench's device in the way that its loss needs."""
    twice = isinstance(bench.workload.loss, WholeBatchLoss)
    return feed(fetched, bench.device.torch_device, meter, twice=twice)


def _check_first(result: WindowResult, micro_batch: int, *, scaled: bool) -> None:
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    # A scaled gradient may overflow in a run that is sound: the scale is lowered then.
    if result.count and not result.applied and not (scaled and what == "gradient"):
        found = result.loss if what == "loss" else result.grad_norm
        raise InputError(
            f"the workload's {what} is {found} on its first micro-batch of {micro_batch}: it must be "
            "finite; look at the data, the loss and the learning rate"
        )


def _step_anyway(trainee: Trainee, mark: Callable[[str], None]) -> None:
    """Let the optimizers' state appear where nothing counted or a scale overflowed: it will, some window."""
    mark("optimizer")
    for parameter in trainee.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with user_code("optimizer"):
        for optimizer in trainee.optimizers:
            optimizer.step()
    trainee.gradients.discard()
