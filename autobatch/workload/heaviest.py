"""The batches of a run that hold its heaviest micro-batches: those with the largest sum of sizes.

Samples that are joined end to end, as graphs are, take memory by the sum of their sizes. Which samples share
a micro-batch follows from the order of the run, so that its heaviest ones are known before it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autobatch.planning import micro_batches
from autobatch.workload.order import GlobalBatchSampler

Sizes = NDArray[np.float64]
Places = NDArray[np.int64]
KEPT = 8
"""Batches that are kept for each split, the heaviest ones."""
BLOCK_SAMPLES = 2**18
"""Samples that are summed at once."""


def heaviest_batches(
    sampler: GlobalBatchSampler, sizes: Sizes, limits: Sequence[int], *, kept: int = KEPT
) -> dict[int, list[int]]:
    """Return the numbers of the batches with the heaviest micro-batches, for several splits by count.

    Args:
        sampler: the batches of the run.
        sizes: size of each sample, by its index.
        limits: the largest micro-batch of each split.
        kept: batches per split.

    Returns:
        For each limit, the numbers of its batches, the heaviest first.
    """
    best = {limit: (np.zeros(0), np.zeros(0, np.int64)) for limit in limits}
    for numbers, ids in _blocks(sampler):
        count = ids.shape[1]
        sums = np.zeros((len(ids), count + 1))
        np.cumsum(sizes[ids], axis=1, out=sums[:, 1:])
        for limit in limits:
            ends = np.cumsum([0, *micro_batches(count, limit)])
            heaviest = np.diff(sums[:, ends], axis=1).max(axis=1)
            totals = np.concatenate([best[limit][0], heaviest])
            places = np.concatenate([best[limit][1], numbers])
            order = np.argsort(-totals, kind="stable")[:kept]
            best[limit] = totals[order], places[order]
    return {limit: places.tolist() for limit, (_, places) in best.items()}


def _blocks(sampler: GlobalBatchSampler) -> Iterator[tuple[Places, Places]]:
    """Yield the numbers of consecutive batches with equally many samples, and these, one row per batch."""
    numbers: list[int] = []
    rows: list[list[int]] = []
    for batch in sampler.batches():
        is_full = len(rows) * len(batch.ids) >= BLOCK_SAMPLES
        if rows and (is_full or len(batch.ids) != len(rows[0])):
            yield np.array(numbers), np.array(rows)
            numbers, rows = [], []
        numbers.append(batch.index)
        rows.append(batch.ids)
    if rows:
        yield np.array(numbers), np.array(rows)
