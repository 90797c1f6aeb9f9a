"""Split of a batch by the sizes of its samples, so that little of a micro-batch is padding.

Samples are sorted by size, the largest first, and the sorted list is cut into contiguous micro-batches. The
largest come first, because large blocks then find the allocator unfragmented, and because a step that runs
out of memory does so at once.

For any cost and any memory that grow with the padded size, some optimal split is contiguous: of two
micro-batches, the one with the largest sample may take the largest samples of both. Its padded size stays,
and that of the other cannot grow. So dynamic programming over the sorted list finds the optimum:

    best[i] = min over k of  cost(k samples of size[i]) + best[i + k],   k ≤ limit(size[i])

Samples that are joined end to end, as graphs are, have no padding. Their micro-batch has the memory of as
many samples of their mean size, so it may be larger than its largest sample would allow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records.plan import MicroBatchCost, SizeCut
from autobatch.planning import micro_batches
from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import MicroBatchIds

Sizes = NDArray[np.float64]
MEASURED_SHARE = 16
"""One in this many samples of a batch, drawn at random, begins a batch whose noise is measured."""


@dataclass(frozen=True, kw_only=True)
class SizeSplit:
    """A split by size; see `autobatch.workload.split.Split`.

    Its ``micro_batch`` is the largest micro-batch of samples of any size. If it shrinks, the limits for all
    sizes shrink in proportion.
    """

    sizes: Sizes
    """Size of each sample of the data, by its index."""
    cut: SizeCut
    measured_every: int | None = None
    """Batches from one measurement of the gradient noise to the next; None for none. The first micro-batch
    of a measured batch is drawn at random, because the gradient of the largest samples is no fair draw."""
    _last: dict[tuple[int, int], list[MicroBatchIds]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def largest(self) -> int:
        """The largest micro-batch of samples of any size."""
        return max(self.cut.micro_batches)

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """See `autobatch.workload.split.Split`."""
        key = (batch.index, micro_batch)
        # The loop and its feed ask for the same batch, one after the other.
        found = self._last.get(key)
        if found is None or sum(len(part.ids) for part in found) != len(batch.ids):
            found = self._parts(batch, micro_batch)
            while len(self._last) > 1:
                self._last.pop(next(iter(self._last)))
            self._last[key] = found
        return found

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `autobatch.workload.split.Split`."""
        size = size_of_part(self.sizes[part.ids], is_padded=self.cut.is_padded)
        limit = self.limits(np.array([size]), self.largest)[0]
        return min(micro_batch, math.ceil(len(part.ids) * self.largest / (2 * int(limit))))

    def of_longest(self, micro_batch: int) -> int:
        """See `autobatch.workload.split.Split`."""
        return max(1, self.cut.micro_batches[-1] * micro_batch // self.largest)

    def _parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        own = self.sizes[batch.ids]
        groups: list[list[int]] = []
        first = 0
        if self.measured_every and batch.index % self.measured_every == 0 and len(own) > 1:
            first = max(1, min(self.of_longest(micro_batch), len(own) // MEASURED_SHARE))
            groups.append(list(range(first)))
        # A stable sort: samples of one size keep their order.
        order = first + np.argsort(-own[first:], kind="stable")
        groups += self.groups(own, order.tolist(), micro_batch)
        if len(groups) == 1:
            # There is nothing to sort for, and a loss over the batch may read the order.
            groups = [list(range(len(own)))]
        return [
            MicroBatchIds(batch.index, places, [batch.ids[place] for place in places]) for places in groups
        ]

    def groups(self, sizes: Sizes, order: list[int], micro_batch: int) -> list[list[int]]:
        """Cut a list of places, sorted by size with the largest first, into micro-batches."""
        sorted_sizes = sizes[order]
        if not self.cut.is_padded:
            counts = fewest_joined(sorted_sizes, partial(self.limits, micro_batch=micro_batch))
        elif self.cut.cost is None:
            counts = micro_batches(len(order), self.of_longest(micro_batch))
        else:
            counts = cheapest_cut(sorted_sizes, self.limits(sorted_sizes, micro_batch), self.cut.cost)
        ends = np.cumsum(counts).tolist()
        return [order[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def limits(self, sizes: Sizes, micro_batch: int) -> NDArray[np.int64]:
        """Return the largest micro-batch of samples up to each size."""
        knots = np.asarray(self.cut.sizes)
        at = np.minimum(np.searchsorted(knots, sizes), len(knots) - 1)
        limits = np.asarray(self.cut.micro_batches, dtype=np.int64)[at]
        return np.maximum(1, limits * micro_batch // self.largest)


def cheapest_cut(
    sizes: Sizes, limits: Sequence[int] | NDArray[np.int64], cost: MicroBatchCost, *, ranks: int = 1
) -> list[int]:
    """Cut a sorted list into contiguous micro-batches of least total cost.

    Args:
        sizes: sizes of the samples, the largest first.
        limits: the largest micro-batch that may begin with each sample.
        cost: cost of a micro-batch.
        ranks: ranks that share each micro-batch, and wait for the one with most of its samples.

    Returns:
        The samples of each micro-batch, in order. Among equal costs, the smaller micro-batch comes first.
    """
    count = len(sizes)
    each = seconds_each(cost, sizes)
    counts = np.ceil(np.arange(1, count + 1, dtype=np.float64) / ranks)
    best = np.zeros(count + 1)
    taken = np.zeros(count, dtype=np.int64)
    for start in range(count - 1, -1, -1):
        most = min(int(limits[start]), count - start)
        totals = each[start] * counts[:most] + best[start + 1 : start + most + 1]
        taken[start] = chosen = int(totals.argmin()) + 1
        best[start] = cost.fixed + totals[chosen - 1]
    return followed(taken)


def fewest_joined(sizes: Sizes, limits: Callable[[Sizes], NDArray[np.int64]]) -> list[int]:
    """Cut a sorted list of samples that are joined, and not padded, into the fewest contiguous micro-batches.

    Each takes as many samples as fit. Their cost is that of their samples in any cut, and a fixed part each.

    Args:
        sizes: sizes of the samples, the largest first.
        limits: returns the largest micro-batches of samples of the given mean sizes.

    Returns:
        The samples of each micro-batch, in order.
    """
    found: list[int] = []
    while sum(found) < len(sizes):
        rest = sizes[sum(found) :]
        counts = np.arange(1, len(rest) + 1)
        fits = counts <= limits(np.cumsum(rest) / counts)
        found.append(max(1, len(rest) if fits.all() else int(fits.argmin())))
    return found


def followed(taken: NDArray[np.int64]) -> list[int]:
    """Return the micro-batches of a cut, given how many samples one takes that begins at each place."""
    found: list[int] = []
    start = 0
    while start < len(taken):
        found.append(int(taken[start]))
        start += found[-1]
    return found


def seconds_each(cost: MicroBatchCost, sizes: Sizes) -> Sizes:
    """Return the seconds of a sample by its size, without what a micro-batch takes in any case."""
    return cost.per_sample + cost.per_size * sizes + cost.per_size_squared * sizes**2


def digest_of(sizes: Sizes) -> str:
    """Return a digest of the sizes of all samples, which tells whether a cut stays the same."""
    return hashlib.sha256(np.ascontiguousarray(sizes, dtype="<f8").tobytes()).hexdigest()[:16]


def size_of_part(sizes: Sizes, *, is_padded: bool = True) -> float:
    """Return the size of each sample in memory: the largest of its micro-batch if padded, else the mean."""
    return float(sizes.max() if is_padded else sizes.mean())
