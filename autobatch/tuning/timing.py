"""Time of an optimizer step at the target batch, measured on a few of its micro-batches."""

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
from autobatch.setup.rehearsal import batches_of, on_copies
from autobatch.setup.setup import Setup
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
"""Steps that are timed, however long they take."""
ACCUMULATED = 2
"""Micro-batches of a timed step: like most of a step, the second one adds to existing gradients."""
FED = 8
"""Micro-batches of a timed step that workers feed: they fetch during the optimizer step too, and its share of
their time must be small."""
QUICK_S = 0.005
"""If a micro-batch is fetched faster, workers gain nothing: handing it over takes a millisecond."""
FETCHES = 3
COMPILED_STEPS = 2
"""Warm-up steps of each size with a compiled model: the second size makes it compile again, for all sizes."""


class Timing(NamedTuple):
    """Seconds of the parts of an optimizer step."""

    micro: float
    """Of a micro-batch: fetch, collate, forward and backward."""
    step: float
    """Once per step: check of the gradients, clipping, the optimizer, a loss over the whole batch."""
    setup: float
    """Once per run: compiling."""

    def a_step(self, micro_batches: int, planned_steps: int) -> float:
        """Return the seconds of an optimizer step, with its share of what comes once per run."""
        return self.micro * micro_batches + self.step + self.setup / planned_steps


def time_steps(
    setup: Setup,
    sizes: list[int],
    seconds: float,
    *,
    prefetch: int = AHEAD,
) -> Timing:
    """Time a configuration on temporary weights, its micro-batches and its optimizer step apart.

    Args:
        setup: the model, the data and the configuration.
        sizes: micro-batches of the target batch, the largest first.
        seconds: approximate time to measure for.
        prefetch: micro-batches that each loader worker fetches ahead.

    Raises:
        Exception: whatever running the configuration raises, out of memory included.
    """
    with (
        preserved_random_state(),
        setup.device.training() as meter,
        on_copies(setup, meter) as train_state,
    ):
        clock = _Stopwatch(setup, train_state, meter)
        del train_state
        kinds = sorted(set(sizes), reverse=True)
        start = setup.clock()
        warm = [clock.step(size, 1) for size in kinds * (COMPILED_STEPS if _compiles(setup) else 1)]
        once = setup.clock() - start if _compiles(setup) else 0.0
        workers = int(setup.knobs.get(LOADER_WORKERS) or 0)
        if workers:
            fed = _time_fed(clock, setup, sizes, seconds, workers=workers, prefetch=prefetch)
            return fed._replace(setup=fed.setup + once)
        count = min(ACCUMULATED, len(sizes))
        timed: list[tuple[float, float]] = []
        start = setup.clock()
        while len(timed) < LEAST_STEPS or setup.clock() - start < seconds:
            timed.append(clock.step(sizes[0], count))
        del clock
    micro, step = (statistics.median(column) for column in zip(*timed, strict=True))
    return Timing(micro, step, max(0.0, once - len(warm) * (micro + step)))


def fetch_share(setup: Setup, size: int) -> float:
    """Return the share of a micro-batch's time that fetching and collating it takes.

    Args:
        setup: the model and the data.
        size: samples of a micro-batch.

    Returns:
        0 if the share is negligible, or unknown because memory runs out.
    """
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    fetching = []
    with preserved_random_state():
        for _ in range(FETCHES):
            start = setup.clock()
            load_micro_batch(
                setup.workload, torch.randint(samples, (size,), generator=draw, device="cpu").tolist()
            )
            fetching.append(setup.clock() - start)
    seconds = statistics.median(fetching)
    if seconds < QUICK_S:
        return 0.0
    micro: float | None = None
    try:
        micro = time_steps(setup, [size], 0.0).micro
    except Exception as error:
        if classify(error) is Verdict.NONE:
            raise
    if micro is None:
        # Outside the except block, nothing keeps the failed step's tensors alive.
        setup.device.release()
        return 0.0
    return min(1.0, seconds / max(seconds, micro))


def _time_fed(
    clock: _Stopwatch, setup: Setup, sizes: list[int], seconds: float, *, workers: int, prefetch: int
) -> Timing:
    """Time steps that loader workers feed, after using up what they fetched in advance.

    Workers finish several micro-batches at once, so the result is a mean over many.
    """
    count = min(FED, len(sizes))
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    batches = partial(_random_batches, samples, sizes[0] * count)
    gpu = gpu_of(setup.device, setup.knobs, setup.workload.loading)
    with open_feed(setup.workload, batches, seed=0, workers=workers, prefetch=prefetch, gpu=gpu) as feed:
        assert feed is not None
        sampler = batches(0)
        first = clock.step(sizes[0], count, feed=feed, batch=next(sampler))
        for _ in range(math.ceil(workers * prefetch / count)):
            clock.step(sizes[0], count, feed=feed, batch=next(sampler))
        timed: list[tuple[float, float]] = []
        start = setup.clock()
        least = max(LEAST_STEPS * count, 2 * workers)
        while len(timed) * count < least or setup.clock() - start < seconds:
            timed.append(clock.step(sizes[0], count, feed=feed, batch=next(sampler)))
    micro, step = (statistics.fmean(column) for column in zip(*timed, strict=True))
    return Timing(micro, step, max(0.0, first[0] - micro) * count)


def _sized(collated: Iterator[Collated], size: int, count: int) -> Iterator[tuple[Collated, int]]:
    # No variable holds the collated micro-batch: it is freed as soon as it has run.
    for _ in range(count):
        yield next(collated), size


def _random_batches(samples: int, size: int, first: int = 0) -> Iterator[GlobalBatch]:
    """Yield batches of samples without end, drawn at random but always the same."""
    draw = torch.Generator().manual_seed(0)
    for index in itertools.count():
        ids = torch.randint(samples, (size,), generator=draw, device="cpu").tolist()
        if index >= first:
            yield GlobalBatch(index, 0, ids)


def _compiles(setup: Setup) -> bool:
    return setup.knobs.get(COMPILE, "off") != "off"


class _Stopwatch:
    """A runner of timed steps on samples that are the same for every configuration."""

    def __init__(self, setup: Setup, train_state: TrainState, meter: Meter) -> None:
        self._setup = setup
        self._train_state = train_state
        self._meter = meter
        self._draw = torch.Generator().manual_seed(0)

    def step(
        self, size: int, count: int, *, feed: Feed | None = None, batch: GlobalBatch | None = None
    ) -> tuple[float, float]:
        """Run a step on samples of its own, or on a batch that a feed collates.

        Returns:
            Seconds per micro-batch, and seconds of what comes once: the optimizer and a loss over the batch.
        """
        clock, device = self._setup.clock, self._setup.device
        began: float | None = None
        once = 0.0

        def mark(phase: str) -> None:
            nonlocal began, once
            if phase == "loss" or began is not None:
                device.synchronize()
                now = clock()
                once += 0.0 if began is None else now - began
                began = now if phase == "loss" else None

        collated = self._drawn(size, count) if feed is None or batch is None else feed.collated(batch, size)
        batches = batches_of(self._setup, self._meter, _sized(collated, size, count))
        samples = batch_samples(self._setup.whole_batch, size, count)
        start = clock()
        totals = accumulate(self._train_state, self._train_state.passing(batches, count), samples, mark)
        device.synchronize()
        between = clock()
        finish(self._train_state, totals, mark=lambda _: None)
        device.synchronize()
        return (between - start - once) / count, clock() - between + once

    def _drawn(self, size: int, count: int) -> Iterator[Collated]:
        samples = len(self._setup.workload.train_data)  # type: ignore[arg-type]
        for _ in range(count):
            ids = torch.randint(samples, (size,), generator=self._draw, device="cpu").tolist()
            yield load_micro_batch(self._setup.workload, ids)
