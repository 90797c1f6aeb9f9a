"""Seconds of an optimizer step at the effective batch, without running a whole window of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch

from autobatch.attempt import Bench, batches_of
from autobatch.caching import window_samples
from autobatch.device.base import Meter
from autobatch.knobs import COMPILE
from autobatch.samples import join
from autobatch.state import lent, preserved_random_state
from autobatch.step import Trainee, accumulate, assemble, finish
from autobatch.workload import Batch

LEAST_WINDOWS = 3
"""Windows that are timed, however long they take."""
ACCUMULATED = 2
"""Micro-batches of a timed window: the second adds to gradients that are there, as most of a window does."""
COMPILED_WINDOWS = 2
"""Windows of each size before a compiled model runs what it will go on to run: the second size that it meets
makes it compile once more, for all sizes."""


class Timing(NamedTuple):
    """What the parts of an optimizer step take, in seconds."""

    micro: float
    """A micro-batch: fetch, join, forward and backward."""
    step: float
    """What comes once a window: the check of the gradients, clipping, the optimizer; a loss over it."""
    setup: float
    """What comes once a run: compiling."""

    def a_step(self, micro_batches: int, planned_steps: int) -> float:
        """Seconds of an optimizer step in a run of so many."""
        return self.micro * micro_batches + self.step + self.setup / planned_steps


def open_trainee(bench: Bench, meter: Meter) -> Trainee:
    """The bench's model, lent already, with what trains it."""
    meter.adopt(tensor.data for tensor in [*bench.model.parameters(), *bench.model.buffers()])
    bench.model.train()
    return assemble(
        bench.workload,
        bench.model,
        bench.device.torch_device,
        precision=bench.precision,
        learning_rate=bench.workload.learning_rate,
        max_grad_norm=bench.max_grad_norm,
        ema=bench.ema,
        knobs=bench.knobs,
    )


def time_steps(bench: Bench, sizes: list[int], seconds: float) -> Timing:
    """Time a configuration on lent tensors: its micro-batches and its optimizer step apart.

    Args:
        bench: the model and the data, and the configuration.
        sizes: the micro-batches of the effective batch, the largest first.
        seconds: how long to measure, about.

    Raises:
        Exception: whatever running it raises, out of memory included.
    """
    with (
        preserved_random_state(),
        bench.device.training() as meter,
        lent(bench.model, bench.device.torch_device),
    ):
        clock = _Stopwatch(bench, open_trainee(bench, meter), meter)
        kinds = sorted(set(sizes), reverse=True)
        start = bench.clock()
        warm = [clock.window(size, 1) for size in kinds * (COMPILED_WINDOWS if _compiles(bench) else 1)]
        setup = bench.clock() - start
        count = min(ACCUMULATED, len(sizes))
        timed: list[tuple[float, float]] = []
        start = bench.clock()
        while len(timed) < LEAST_WINDOWS or bench.clock() - start < seconds:
            timed.append(clock.window(sizes[0], count))
        del clock
    micro, step = (statistics.median(column) for column in zip(*timed, strict=True))
    setup = max(0.0, setup - len(warm) * (micro + step)) if _compiles(bench) else 0.0
    return Timing(micro, step, setup)


def _compiles(bench: Bench) -> bool:
    return bench.knobs.get(COMPILE, "off") != "off"


class _Stopwatch:
    """Runs windows on samples that are the same for every configuration."""

    def __init__(self, bench: Bench, trainee: Trainee, meter: Meter) -> None:
        self._bench = bench
        self._trainee = trainee
        self._meter = meter
        self._draw = torch.Generator().manual_seed(0)

    def window(self, size: int, count: int) -> tuple[float, float]:
        """Seconds a micro-batch, and of what comes once: the optimizer step, a loss over the whole window."""
        clock, device = self._bench.clock, self._bench.device
        began: float | None = None
        once = 0.0

        def mark(phase: str) -> None:
            nonlocal began, once
            if phase == "loss" or began is not None:
                device.synchronize()
                now = clock()
                once += 0.0 if began is None else now - began
                began = now if phase == "loss" else None

        batches = batches_of(self._bench, self._meter, self._fetched(size, count))
        samples = window_samples(self._bench.window, size, count)
        start = clock()
        tally = accumulate(self._trainee, batches, samples, mark)
        device.synchronize()
        between = clock()
        finish(self._trainee, tally, mark=lambda _: None)
        device.synchronize()
        return (between - start - once) / count, clock() - between + once

    def _fetched(self, size: int, count: int) -> Iterator[tuple[Batch, int]]:
        samples = len(self._bench.workload.train_data)  # type: ignore[arg-type]
        for _ in range(count):
            ids = torch.randint(samples, (size,), generator=self._draw).tolist()
            yield join(self._bench.workload, ids), size
