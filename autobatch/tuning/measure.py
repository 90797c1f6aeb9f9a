"""Measurements of a configuration: the time of a step at the target batch, and the losses beside fp32."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from autobatch.core.knobs import COMPILE, LOADER_WORKERS
from autobatch.rehearsal.rehearsal import Batch, Step, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.step.whole_batch import batch_samples
from autobatch.tuning.configuration import Infeasible
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.loader import AHEAD, gpu_of, open_feed
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state, seed_torch

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
CHECK_STEPS = 10
CHECK_MICRO_BATCHES = 2
"""Micro-batches of a step of the loss check."""
CHECK_SAMPLES = 8
"""Samples of such a micro-batch: enough to see a loss go wrong, and cheap."""
TOLERANCE = 0.02
"""Bound on the mean relative distance of the losses; a model in bf16 stays well below it."""


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


def time_steps(setup: Setup, sizes: list[int], seconds: float, *, prefetch: int = AHEAD) -> Timing:
    """Time a configuration on temporary weights, its micro-batches and its optimizer step apart.

    Args:
        setup: the model, the data and the configuration.
        sizes: micro-batches of the target batch, the largest first.
        seconds: approximate time to measure for.
        prefetch: micro-batches that each loader worker fetches ahead.

    Raises:
        Infeasible: the configuration runs out of memory.
        Exception: whatever running the configuration raises.
    """
    compiles = setup.knobs.get(COMPILE, "off") != "off"
    workers = int(setup.knobs.get(LOADER_WORKERS) or 0)
    kinds = sorted(set(sizes), reverse=True) * (COMPILED_STEPS if compiles else 1)
    draw = torch.Generator().manual_seed(0)
    warm = (_random_batch(setup, size, 1, draw) for size in kinds)
    count = min(FED if workers else ACCUMULATED, len(sizes))
    # The first steps use up what workers have fetched in advance.
    ahead = 1 + math.ceil(workers * prefetch / count) if workers else 0
    numbers = itertools.chain(range(ahead), _until(setup, max(LEAST_STEPS, 2 * workers // count), seconds))
    if workers:
        timed = _fed(setup, sizes[0], count, numbers, prefetch=prefetch)
    else:
        timed = (_random_batch(setup, sizes[0], count, draw) for _ in numbers)
    with closing(timed):
        steps = _rehearsed(setup, itertools.chain(warm, timed))
    compiling = sum(step.seconds for step in steps[: len(kinds)]) if compiles else 0.0
    first, measured = steps[len(kinds)], steps[len(kinds) + ahead :]
    # Workers finish several micro-batches at once, so that only a mean over many counts.
    middle = statistics.fmean if workers else statistics.median
    micro = middle(step.micro_seconds for step in measured)
    once = middle(step.once_seconds for step in measured)
    if workers:
        return Timing(micro, once, compiling + max(0.0, first.micro_seconds - micro) * count)
    return Timing(micro, once, max(0.0, compiling - len(kinds) * (micro + once)))


def _rehearsed(setup: Setup, batches: Iterator[Batch]) -> list[Step]:
    """Rehearse batches at full speed, and return the steps."""
    found = rehearse(setup, batches)
    if found.failure is not None:
        raise Infeasible(found.failure.reason)
    return found.steps


def _random_batch(setup: Setup, size: int, count: int, draw: torch.Generator) -> Batch:
    """Return a batch of ``count`` micro-batches of random samples."""
    drawn = (_load_random(setup, size, draw) for _ in range(count))
    return _batch(setup, drawn, size, count)


def _batch(setup: Setup, collated: Iterator[Collated], size: int, count: int) -> Batch:
    """Return a batch of the next ``count`` micro-batches, each of which is freed as soon as it has run."""
    sized = ((next(collated), size) for _ in range(count))
    return Batch(sized, count, batch_samples(setup.whole_batch, size, count))


def fetch_share(setup: Setup, size: int) -> float:
    """Return the share of the time of a micro-batch of this size that fetching and collating it takes.

    It is 0 if it is negligible, or unknown because memory runs out.
    """
    draw = torch.Generator().manual_seed(0)
    fetching = []
    with preserved_random_state():
        for _ in range(FETCHES):
            start = setup.clock()
            _load_random(setup, size, draw)
            fetching.append(setup.clock() - start)
    seconds = statistics.median(fetching)
    if seconds < QUICK_S:
        return 0.0
    try:
        micro = time_steps(setup, [size], 0.0).micro
    except Infeasible:
        return 0.0
    return min(1.0, seconds / max(seconds, micro))


class LossCheck:
    """A comparison of losses with a short run in fp32 with every knob at its default, on the same samples.

    Compiled code draws other random numbers in the forward pass than the model does. So the tolerance is at
    least twice the distance of two runs of the reference with different seeds.

    Raises:
        Infeasible: the reference, or the configuration, runs out of memory.
    """

    def __init__(self, setup: Setup, micro_batch: int) -> None:
        reference = replace(setup, precision="fp32", knobs={})
        self._size = min(CHECK_SAMPLES, micro_batch)
        self._losses = _losses(reference, self._size, seed=1)
        noise = _distance(self._losses, _losses(reference, self._size, seed=2))
        self._tolerance = max(TOLERANCE, 2 * noise)

    def over(self, setup: Setup) -> float:
        """Return by how much the relative distance to the reference exceeds the tolerance; at most 1."""
        if not all(map(math.isfinite, self._losses)):
            # Nothing can be compared with a reference that does not train.
            return -TOLERANCE
        gap = _distance(self._losses, _losses(setup, self._size, seed=1))
        return min(1.0, gap - self._tolerance) if math.isfinite(gap) else 1.0


def _fed(
    setup: Setup, size: int, count: int, numbers: Iterator[int], *, prefetch: int
) -> Generator[Batch, None, None]:
    """Yield batches that loader workers collate, one for each of ``numbers``."""
    batches = partial(_random_batches, setup, size * count)
    gpu = gpu_of(setup.device, setup.knobs, setup.workload.loading)
    workers = int(setup.knobs.get(LOADER_WORKERS) or 0)
    with open_feed(setup.workload, batches, seed=0, workers=workers, prefetch=prefetch, gpu=gpu) as feed:
        for _, batch in zip(numbers, batches(0), strict=False):
            yield _batch(setup, feed.collated(batch, size), size, count)


def _random_batches(setup: Setup, size: int, first: int = 0) -> Iterator[GlobalBatch]:
    """Yield batches of random samples without end, always the same, from number ``first`` on."""
    draw = torch.Generator().manual_seed(0)
    for index in itertools.count():
        ids = _draw_ids(setup, size, draw)
        if index >= first:
            yield GlobalBatch(index, 0, ids)


def _load_random(setup: Setup, size: int, draw: torch.Generator) -> Collated:
    return load_micro_batch(setup.workload, _draw_ids(setup, size, draw))


def _draw_ids(setup: Setup, size: int, draw: torch.Generator) -> list[int]:
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    return torch.randint(samples, (size,), generator=draw, device="cpu").tolist()


def _until(setup: Setup, least: int, seconds: float) -> Iterator[int]:
    """Count until so many seconds have passed, but to ``least`` at least."""
    start = setup.clock()
    for number in itertools.count():
        if number >= least and setup.clock() - start >= seconds:
            return
        yield number


def _distance(reference: list[float], losses: list[float]) -> float:
    """Return the mean absolute difference ÷ the mean absolute value of the reference."""
    scale = sum(map(abs, reference)) or 1.0
    return sum(abs(a - b) for a, b in zip(reference, losses, strict=True)) / scale


def _losses(setup: Setup, size: int, *, seed: int) -> list[float]:
    """Return the losses of the first steps, without dropout, on samples that are always the same."""
    draw = torch.Generator().manual_seed(0)

    def batches() -> Iterator[Batch]:
        for module in setup.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        seed_torch(seed)
        for _ in range(CHECK_STEPS):
            yield _random_batch(setup, size, CHECK_MICRO_BATCHES, draw)

    return [step.result.loss for step in _rehearsed(setup, batches())]
