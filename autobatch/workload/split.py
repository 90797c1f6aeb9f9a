"""The split of a batch into micro-batches: which samples share one, on which rank, and in what order.

A split changes no batch and no gradient, because a step divides Σ totals by Σ counts. The loop, the feeds and
the loader workers all ask it. A process that trains alone is the only rank. The arithmetic is in
`autobatch.planning`.

A split by size sorts the samples, the largest first, and cuts the sorted list into contiguous groups, one
micro-batch of each for every rank. The largest come first, because large blocks then find the allocator
unfragmented, and because a step that runs out of memory does so at once. Each group is dealt to all ranks, so
that they work on samples of like sizes at the same time, and the rank with the least work so far takes the
most of it. Every rank cuts for all of them, so that they agree without a message.

Samples that are concatenated, as graphs are, have no padding. Their micro-batch has the memory of as
many samples of their mean size, so it may be larger than its largest sample would allow.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records import SizeCut
from autobatch.planning import FIXED_SHARE, cut_by_area, fewest_joined, micro_batches, split_over_ranks
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler

Sizes = NDArray[np.float64]
MEASURED_SHARE = 16
"""One in this many samples of a batch, drawn at random, begins a batch whose noise is measured."""
HEAVIEST = 8
"""Batches that are kept for each split, the heaviest ones."""


class MicroBatchIds(NamedTuple):
    """The sample ids of a micro-batch."""

    batch_index: int
    """Number of its batch in the run."""
    places: Sequence[int]
    """Place of each sample in the batch as it was drawn, which seeds its random draws."""
    ids: list[int]


class Split:
    """Micro-batches of equal counts, in the order of the batch; the counts differ by at most one.

    One number, ``micro_batch``, shrinks a split after an out-of-memory error.

    Args:
        rank: this rank.
        limits: the largest micro-batch of each rank, changed after an out-of-memory error; nothing for one.
        multiple: number whose multiples all micro-batches are, but for the last one of a batch.
    """

    def __init__(self, rank: int = 0, limits: Sequence[int] = (), multiple: int = 1) -> None:
        self.rank = rank
        self.limits = list(limits)
        self.multiple = multiple

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """Return the micro-batches of this rank; empty if it takes no sample.

        Args:
            batch: its sample ids.
            micro_batch: the largest number of samples in any micro-batch of this rank.
        """
        of_ranks = split_over_ranks(len(batch.ids), self._limits_with(micro_batch), self.multiple)
        found, first = [], sum(of_ranks[: self.rank])
        for size in micro_batches(of_ranks[self.rank], micro_batch, self.multiple):
            places = range(first, first + size)
            found.append(MicroBatchIds(batch.index, places, batch.ids[first : first + size]))
            first += size
        return found

    def rounds(self, batch: GlobalBatch) -> int:
        """Return the most micro-batches that any rank runs of a batch."""
        of_ranks = split_over_ranks(len(batch.ids), self.limits, self.multiple)
        found = zip(of_ranks, self.limits, strict=True)
        return max(len(micro_batches(share, limit, self.multiple)) for share, limit in found)

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """Return the ``micro_batch`` that halves a part, which ran out of memory."""
        del micro_batch
        return self.multiple * math.ceil(len(part.ids) / self.multiple / 2)

    def of_longest(self, micro_batch: int) -> int:
        """Return the largest micro-batch of the most expensive samples."""
        return micro_batch

    def _limits_with(self, micro_batch: int) -> list[int]:
        """Return the limits of all ranks, with another one for this rank."""
        return [*self.limits[: self.rank], micro_batch, *self.limits[self.rank + 1 :]]


class SizeSplit(Split):
    """A split by size.

    Its ``micro_batch`` is the largest micro-batch of samples of any size. If it shrinks, the limits for all
    sizes shrink in proportion.

    Args:
        sizes: size of each sample of the data, by its index.
        cut: the largest micro-batch for each size.
        measured_every: batches from one measurement of the gradient noise to the next; None for none. The
            first micro-batch of a measured batch is drawn at random, because the gradient of the largest
            samples is no fair draw.
        rank: this rank.
        limits: the largest micro-batch of each rank, of samples of any size; nothing for one.
    """

    def __init__(
        self,
        *,
        sizes: Sizes,
        cut: SizeCut,
        measured_every: int | None = None,
        rank: int = 0,
        limits: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, limits)
        self.sizes = sizes
        self.cut = cut
        self._measured_every = measured_every
        self._knots = np.asarray(cut.sizes)
        self._of_knots = np.asarray(cut.micro_batches, dtype=np.int64)
        self._last: dict[tuple[int, int, tuple[int, ...]], list[list[MicroBatchIds]]] = {}

    @property
    def largest(self) -> int:
        """The largest micro-batch of samples of any size."""
        return max(self.cut.micro_batches)

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """See `Split.parts`."""
        return self._of_batch(batch, self._limits_with(micro_batch))[self.rank]

    def rounds(self, batch: GlobalBatch) -> int:
        """See `Split.rounds`."""
        return max(map(len, self._of_batch(batch, self.limits)))

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `Split.halved`."""
        size = size_of_part(self.sizes[part.ids], is_padded=self.cut.is_padded)
        limit = self.limits_at(np.array([size]), self.largest)[0]
        return min(micro_batch, math.ceil(len(part.ids) * self.largest / (2 * int(limit))))

    def of_longest(self, micro_batch: int) -> int:
        """See `Split.of_longest`."""
        return max(1, self.cut.micro_batches[-1] * micro_batch // self.largest)

    def limits_at(self, sizes: Sizes, micro_batch: int) -> NDArray[np.int64]:
        """Return the largest micro-batch of samples up to each size."""
        at = np.minimum(np.searchsorted(self._knots, sizes), len(self._knots) - 1)
        return np.maximum(1, self._of_knots[at] * micro_batch // self.largest)

    def fixed_area(self, micro_batch: int) -> float:
        """Return the cost of a micro-batch besides its area, in the same unit."""
        return FIXED_SHARE * self.of_longest(micro_batch) * self.cut.sizes[-1]

    def _of_batch(self, batch: GlobalBatch, limits: list[int]) -> list[list[MicroBatchIds]]:
        """Return the micro-batches of every rank."""
        # The loop, its feed and its engine ask for the same batch, one after the other.
        key = (batch.index, len(batch.ids), tuple(limits))
        found = self._last.get(key)
        if found is None:
            found = [
                [
                    MicroBatchIds(batch.index, places, [batch.ids[place] for place in places])
                    for places in of_rank
                    if places
                ]
                for of_rank in self._places(self.sizes[batch.ids], batch.index, limits)
            ]
            while len(self._last) > 1:
                self._last.pop(next(iter(self._last)))
            self._last[key] = found
        return found

    def _places(self, own: Sizes, index: int, limits: list[int]) -> list[list[list[int]]]:
        """Return the places of the samples in each micro-batch of every rank; some may be empty."""
        first = 0
        if self._measured_every and index % self._measured_every == 0 and len(own) > 1:
            of_longest = sum(self.of_longest(one) for one in limits)
            first = max(1, min(of_longest, len(own) // MEASURED_SHARE))
        # A stable sort: samples of one size keep their order.
        order = (first + np.argsort(-own[first:], kind="stable")).tolist()
        groups = [list(range(first))] if first else []
        concatenated: list[list[list[int]]] = [[] for _ in limits]
        if self.cut.is_padded:
            groups += _cut_at(order, self._cut(own[order], limits))
        else:
            hands = _dealt(order, split_over_ranks(len(order), limits))
            concatenated = [
                _cut_at(hand, fewest_joined(own[hand], functools.partial(self.limits_at, micro_batch=limit)))
                for hand, limit in zip(hands, limits, strict=True)
            ]
        dealt = self._deal(groups, own, limits)
        places = [mine + rest for mine, rest in zip(dealt, concatenated, strict=True)]
        # There is nothing to sort for in one micro-batch, and a loss over the batch may read the order.
        return [[list(range(len(own)))]] if list(map(len, places)) == [1] else places

    def _cut(self, sizes: Sizes, limits: list[int]) -> list[int]:
        """Cut a list of sizes, the largest first, into groups with a micro-batch for every rank."""
        together = np.sum([self.limits_at(sizes, one) for one in limits], axis=0)
        fixed = max(map(self.fixed_area, limits))
        return cut_by_area(sizes, together, fixed=fixed, ranks=len(limits))

    def _deal(self, groups: list[list[int]], own: Sizes, limits: list[int]) -> list[list[list[int]]]:
        """Deal groups of places to the ranks, each up to its limit, so that all have the same work."""
        found: list[list[list[int]]] = [[] for _ in limits]
        work = [0.0] * len(limits)
        for group in groups:
            size = own[group].max(keepdims=True)
            order = sorted(range(len(limits)), key=work.__getitem__)
            counts = split_over_ranks(
                len(group), [int(self.limits_at(size, limits[rank])[0]) for rank in order]
            )
            for rank, hand in zip(order, _dealt(group, counts), strict=True):
                found[rank].append(hand)
                if hand:
                    work[rank] += self.fixed_area(limits[rank]) + len(hand) * float(own[hand].max())
        return found


def _dealt(group: list[int], counts: list[int]) -> list[list[int]]:
    """Deal a group in turns to hands that get these counts; the first one gets the largest sample."""
    hands_of = range(len(counts))
    turns = [hand for turn in range(max(counts)) for hand in hands_of if turn < counts[hand]]
    hands: list[list[int]] = [[] for _ in counts]
    for place, hand in zip(group, turns, strict=True):
        hands[hand].append(place)
    return hands


def _cut_at(order: list[int], counts: list[int]) -> list[list[int]]:
    return [order[start:end] for start, end in pairwise([0, *accumulate(counts)])]


def digest_of(sizes: Sizes) -> str:
    """Return a digest of the sizes of all samples, which tells whether a cut stays the same."""
    return hashlib.sha256(np.ascontiguousarray(sizes, dtype="<f8").tobytes()).hexdigest()[:16]


def size_of_part(sizes: Sizes, *, is_padded: bool = True) -> float:
    """Return the size of each sample in memory: the largest of its micro-batch if padded, else the mean."""
    return float(sizes.max() if is_padded else sizes.mean())


def heaviest_batches(
    sampler: GlobalBatchSampler, sizes: Sizes, limits: Sequence[int], *, kept: int = HEAVIEST
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
    best: dict[int, list[tuple[float, int]]] = {limit: [] for limit in limits}
    starts_of = functools.cache(lambda *key: np.cumsum([0, *micro_batches(*key)[:-1]]))
    for batch in sampler.batches():
        own = sizes[batch.ids]
        for limit, heap in best.items():
            heaviest = float(np.add.reduceat(own, starts_of(len(own), limit)).max())
            heapq.heappush(heap, (heaviest, -batch.index))
            if len(heap) > kept:
                heapq.heappop(heap)
    return {limit: [-number for _, number in sorted(heap, reverse=True)] for limit, heap in best.items()}
