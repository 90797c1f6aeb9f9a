"""Finders of the largest micro-batch, each on the same limit, with their runs and out-of-memory errors."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch

import autobatch
from autobatch import Workload
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.device.base import Device, Meter
from autobatch.rehearsal.attempt import ATTEMPT_STEPS
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of
from benchmarks.probe.limits import Limit

START = 4096
"""Samples with which accelerate begins."""


class Answer(NamedTuple):
    """The answer of a finder."""

    found: int
    runs: int
    ooms: int
    seconds: float


def by_autobatch(limit: Limit) -> Answer:
    """Probe as a user does, without saved limits."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, AUTOBATCH_HOME=home):
        try:
            probe = autobatch.probe(
                limit.workload, device=limit.device, memory_budget=limit.budget, progress=False
            )
        except autobatch.DoesNotFitError:
            return Answer(0, 1, 1, time.perf_counter() - start)
    # Of the most expensive samples alone, as for every finder; those of the run may let more fit.
    found = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    return Answer(found, len(probe.attempts), probe.oom_count, time.perf_counter() - start)


def by_accelerate(limit: Limit) -> Answer:
    """Run accelerate as its documentation shows: the decorated function builds model and optimizer."""
    from accelerate.utils import find_executable_batch_size

    device = limit.setup().device
    counts = [0, 0]
    start = time.perf_counter()

    # A loader over fewer samples than the size would run a smaller batch.
    @find_executable_batch_size(starting_batch_size=min(START, limit.cap))
    def train(batch_size: int) -> int:
        counts[0] += 1
        try:
            with meter_of(device) as meter:
                train_anew(limit.workload, meter, batch_size)
        except torch.OutOfMemoryError:
            counts[1] += 1
            raise
        return batch_size

    try:
        found = train()
    except RuntimeError as error:
        if "reached zero" not in str(error):
            raise
        found = 0
    return Answer(found, *counts, time.perf_counter() - start)


def train_anew(workload: Workload, meter: Meter, size: int) -> None:
    """Run the steps of an attempt on the first samples of a shuffled loader."""
    torch.manual_seed(0)
    model = workload.model().train()
    cpu = torch.device("cpu")
    train_state = build_train_state(
        workload, model, cpu, StepSettings(precision="fp32"), learning_rate=workload.learning_rate
    )
    order = torch.randperm(len(workload.train_data)).tolist()  # type: ignore[arg-type]
    for count in ATTEMPT_STEPS:

        def batches(count: int = count):
            for _ in range(count):
                with meter.uncounted():
                    batch = load_micro_batch(workload, [order[i % len(order)] for i in range(size)])
                meter.count(tensors_of(batch))
                order[:] = order[size:] + order[:size]
                yield batch, size

        train_step(train_state, batches(), count * size)


def meter_of(device: Device) -> AbstractContextManager[Meter]:
    """Return the meter of the device; on the CPU with the message of torch's allocator, which others
    expect."""
    if device.kind != "cpu":
        return device.enforced()
    return StorageTracker(
        device.new_allocator(),  # type: ignore[attr-defined]
        text=lambda error: (
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {error.attempted} bytes."
        ),
        record=False,
    )


def finders(*, lightning: bool) -> dict[str, Callable[[Limit], Answer]]:
    """Return every other finder whose library is installed, by name."""
    found: dict[str, Callable[[Limit], Answer]] = {}
    if importlib.util.find_spec("accelerate"):
        found[f"accelerate, start {START}"] = by_accelerate
    if lightning and importlib.util.find_spec("lightning"):
        from benchmarks.probe.lightning_finder import by_lightning

        for mode in ("power", "binsearch"):
            found[f"Lightning {mode}"] = partial(by_lightning, mode=mode)
    return found
