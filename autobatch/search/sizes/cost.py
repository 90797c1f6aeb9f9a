"""The time of a micro-batch as a function of its samples and of their size, measured on a few shapes.

The cheapest cut depends on it. If launches of kernels bind, a few large micro-batches are the fastest; if
arithmetic binds, many with little padding are. So the cost is measured and not assumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records.plan import MicroBatchCost
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify
from autobatch.setup.attempt import TrainSetup, batches_of, on_copies
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import accumulate
from autobatch.workload.data import load_micro_batch
from autobatch.workload.rng import preserved_random_state

SECONDS = 4.0
"""Time after which no further round of measurements begins."""
ROUNDS = 5
"""Measurements of each shape at least, in turns; the fastest counts, because disturbances only add."""
MOST_ROUNDS = 25
"""Measurements of each shape at most, if they take no more than a quarter of the time."""
LEAST_FIXED = 0.5
"""Share of the time of the smallest micro-batch that is taken to be fixed at least. Disturbed measurements
may show none, and a cut into single samples would follow."""
LEAST_SHAPES = 4
TERMS = 4
"""Terms of `MicroBatchCost`."""


class TimedShape(NamedTuple):
    """Seconds of a micro-batch of equal samples."""

    micro_batch: int
    size: float
    seconds: float


def measure_cost(setup: TrainSetup, sizes: NDArray[np.float64], limit: int) -> MicroBatchCost | None:
    """Measure micro-batches of a few shapes, and fit their cost. The model and the random states stay.

    Args:
        setup: the model and the data.
        sizes: size of each sample, by its index.
        limit: the largest micro-batch of the longest samples.

    Returns:
        None if memory or time does not suffice.
    """
    timed: list[TimedShape] = []
    try:
        with (
            preserved_random_state(),
            setup.device.training() as meter,
            on_copies(setup, meter) as train_state,
        ):
            start = setup.clock()
            best: dict[tuple[int, int], float] = {}
            for shape in _shapes(sizes, limit):
                # The first run of a shape warms up. If shapes are slow, the most expensive are left out.
                if len(best) >= LEAST_SHAPES and setup.clock() - start > SECONDS / 2:
                    break
                best[shape] = math.inf
                _time(setup, train_state, meter, shape)
            for number in range(MOST_ROUNDS):
                if number and setup.clock() - start > SECONDS / (1 if number < ROUNDS else 4):
                    break
                for shape, least in best.items():
                    best[shape] = min(least, _time(setup, train_state, meter, shape))
            timed = [TimedShape(count, float(sizes[index]), best[index, count]) for index, count in best]
            train_state.gradients.clear()
            del train_state
    except Exception as error:
        if classify(error) is Verdict.NONE:
            raise
    setup.device.release()
    return fit_cost(timed) if len(timed) >= LEAST_SHAPES else None


def _shapes(sizes: NDArray[np.float64], limit: int) -> list[tuple[int, int]]:
    """Return samples of several sizes with a number of copies each, the cheapest first."""
    order = np.argsort(sizes, kind="stable")
    samples = [int(order[round(share * (len(order) - 1))]) for share in (0.1, 0.5, 0.9, 1.0)]
    counts = sorted({1, max(1, round(math.sqrt(limit))), limit})
    shapes = set(itertools.product(samples, counts))
    return sorted(shapes, key=lambda shape: (sizes[shape[0]] * shape[1], shape))


def _time(setup: TrainSetup, train_state: TrainState, meter: Meter, shape: tuple[int, int]) -> float:
    """Return the time of a micro-batch of copies of a sample: fetched, collated, forward and backward."""
    ids = [shape[0]] * shape[1]
    start = setup.clock()
    fetched = ((load_micro_batch(setup.workload, ids), len(ids)) for _ in range(1))
    # A loss over the whole batch makes its two passes only for a part of a batch.
    samples = len(ids) if setup.whole_batch is None else 2 * len(ids)
    accumulate(
        train_state, train_state.passing(batches_of(setup, meter, fetched), 1), samples, lambda _: None
    )
    setup.device.synchronize()
    return setup.clock() - start


def fit_cost(timed: Sequence[TimedShape]) -> MicroBatchCost:
    """Fit a cost to measured shapes: least squares of relative errors, without negative terms."""
    seconds = np.array([shape.seconds for shape in timed])
    least = LEAST_FIXED * float(seconds.min())
    rows = np.array([[1.0, m, m * size, m * size**2] for m, size, _ in timed]) / seconds[:, None]
    rest = (seconds - least) / seconds
    best: tuple[float, NDArray[np.float64]] | None = None
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(TERMS), number) for number in range(1, TERMS + 1)
    ):
        found, *_ = np.linalg.lstsq(rows[:, kept], rest, rcond=None)
        if (found < 0).any():
            continue
        error = float(((rows[:, kept] @ found - rest) ** 2).sum())
        if best is None or error < best[0]:
            terms = np.zeros(TERMS)
            terms[list(kept)] = found
            best = error, terms
    assert best is not None, "a single term is never negative"
    fixed, per_sample, per_size, per_size_squared = best[1].tolist()
    return MicroBatchCost(
        fixed=least + fixed, per_sample=per_sample, per_size=per_size, per_size_squared=per_size_squared
    )
