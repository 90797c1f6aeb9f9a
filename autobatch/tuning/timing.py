"""Seconds of an optimizer step at the effective batch, without running a whole window of it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from autobatch.core.knobs import COMPILE, LOADER_WORKERS
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify
from autobatch.probing.attempt import TrainSetup, batches_of, open_train_state
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import accumulate, finish
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.feed import AHEAD, Feed
from autobatch.workload.loader import gpu_of, open_feed
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state

LEAST_STEPS = 3
"""Windows that are timed, however long they take."""


ACCUMULATED = 2
"""Micro-batches of a timed window: the second adds to gradients that are there, as most of a window does."""


FED = 8
"""Micro-batches of a timed window that workers feed: they go on while the optimizer steps, which few would
share out among themselves."""


QUICK_SECONDS = 0.005
"""A micro-batch that is fetched in less gains nothing from workers: handing it over takes a millisecond."""


FETCHES = 3


COMPILED_STEPS = 2
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


def time_steps(setup: TrainSetup, sizes: list[int], seconds: float, *, prefetch: int = AHEAD) -> Timing:
    """Time a configuration on lent tensors: its micro-batches and its optimizer step apart.

    Args:
        setup: the model and the data, and the configuration.
        sizes: the micro-batches of the effective batch, the largest first.
        seconds: how long to measure, about.
        prefetch: micro-batches that each loader worker is ahead by, where the configuration has some.

    Raises:
        Exception: whatever running it raises, out of memory included.
    """
    with (
        preserved_random_state(),
        setup.device.training() as meter,
        temporary_weights(setup.model, setup.device.torch_device),
    ):
        clock = _Stopwatch(setup, open_train_state(setup, meter), meter)
        kinds = sorted(set(sizes), reverse=True)
        start = setup.clock()
        warm = [clock.window(size, 1) for size in kinds * (COMPILED_STEPS if _compiles(setup) else 1)]
        once = setup.clock() - start
        workers = int(setup.knobs.get(LOADER_WORKERS) or 0)
        if workers:
            fed = _time_fed(clock, setup, sizes, seconds, workers=workers, prefetch=prefetch)
            return fed._replace(setup=fed.setup + (once if _compiles(setup) else 0.0))
        count = min(ACCUMULATED, len(sizes))
        timed: list[tuple[float, float]] = []
        start = setup.clock()
        while len(timed) < LEAST_STEPS or setup.clock() - start < seconds:
            timed.append(clock.window(sizes[0], count))
        del clock
    micro, step = (statistics.median(column) for column in zip(*timed, strict=True))
    once = max(0.0, once - len(warm) * (micro + step)) if _compiles(setup) else 0.0
    return Timing(micro, step, once)


def fetch_share(setup: TrainSetup, size: int) -> float:
    """Share of a micro-batch's time that fetching and joining it takes; 0 where that is next to nothing.

    Where memory runs out it is not known, and 0.

    Args:
        setup: the model and the data.
        size: samples of a micro-batch.
    """
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    fetching = []
    with preserved_random_state():
        for _ in range(FETCHES):
            start = setup.clock()
            load_micro_batch(setup.workload, torch.randint(samples, (size,), generator=draw).tolist())
            fetching.append(setup.clock() - start)
    seconds = statistics.median(fetching)
    if seconds < QUICK_SECONDS:
        return 0.0
    micro: float | None = None
    try:
        micro = time_steps(setup, [size], 0.0).micro
    except Exception as error:
        if classify(error) is Verdict.NONE:
            raise
    if micro is None:
        # Out of the except block: nothing keeps the failed step's tensors alive any more.
        setup.device.release()
        return 0.0
    return min(1.0, seconds / max(seconds, micro))


def _time_fed(
    clock: _Stopwatch, setup: TrainSetup, sizes: list[int], seconds: float, *, workers: int, prefetch: int
) -> Timing:
    """Time windows that loader workers feed, once what they had fetched before is used up.

    They finish several micro-batches at once, so what counts is the mean over many.
    """
    count = min(FED, len(sizes))
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    windows = partial(_random_batches, samples, sizes[0] * count)
    gpu = gpu_of(setup.device, setup.knobs)
    with open_feed(setup.workload, windows, seed=0, workers=workers, prefetch=prefetch, gpu=gpu) as feed:
        assert feed is not None
        sampler = windows(0)
        first = clock.window(sizes[0], count, feed=feed, window=next(sampler))
        for _ in range(math.ceil(workers * prefetch / count)):
            clock.window(sizes[0], count, feed=feed, window=next(sampler))
        timed: list[tuple[float, float]] = []
        start = setup.clock()
        while len(timed) * count < max(LEAST_STEPS * count, 2 * workers) or setup.clock() - start < seconds:
            timed.append(clock.window(sizes[0], count, feed=feed, window=next(sampler)))
    micro, step = (statistics.fmean(column) for column in zip(*timed, strict=True))
    return Timing(micro, step, max(0.0, first[0] - micro) * count)


def _sized(joined: Iterator[Collated], size: int, count: int) -> Iterator[tuple[Collated, int]]:
    # Kept in no variable: a batch is gone once its micro-batch is through.
    for _ in range(count):
        yield next(joined), size


def _random_batches(samples: int, size: int, first: int = 0) -> Iterator[GlobalBatch]:
    """Windows of samples drawn at random, the same every time; without end."""
    draw = torch.Generator().manual_seed(0)
    for index in itertools.count():
        ids = torch.randint(samples, (size,), generator=draw).tolist()
        if index >= first:
            yield GlobalBatch(index, 0, ids)


def _compiles(setup: TrainSetup) -> bool:
    return setup.knobs.get(COMPILE, "off") != "off"


class _Stopwatch:
    """Runs windows on samples that are the same for every configuration."""

    def __init__(self, setup: TrainSetup, train_state: TrainState, meter: Meter) -> None:
        self._bench = setup
        self._trainee = train_state
        self._meter = meter
        self._draw = torch.Generator().manual_seed(0)

    def window(
        self, size: int, count: int, *, feed: Feed | None = None, window: GlobalBatch | None = None
    ) -> tuple[float, float]:
        """Seconds a micro-batch, and of what comes once: the optimizer step, a loss over the whole window.

        Where ``feed`` is given, of a window of its.
        """
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

        joined = self._drawn(size, count) if feed is None or window is None else feed.collated(window, size)
        batches = batches_of(self._bench, self._meter, _sized(joined, size, count))
        samples = batch_samples(self._bench.whole_batch, size, count)
        start = clock()
        accumulator = accumulate(self._trainee, batches, samples, mark)
        device.synchronize()
        between = clock()
        finish(self._trainee, accumulator, mark=lambda _: None)
        device.synchronize()
        return (between - start - once) / count, clock() - between + once

    def _drawn(self, size: int, count: int) -> Iterator[Collated]:
        samples = len(self._bench.workload.train_data)  # type: ignore[arg-type]
        for _ in range(count):
            yield load_micro_batch(
                self._bench.workload, torch.randint(samples, (size,), generator=self._draw).tolist()
            )
