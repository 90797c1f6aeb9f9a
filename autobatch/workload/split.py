"""The split of a batch into micro-batches: which samples share one, on which rank, and in what order.

A split changes no batch and no gradient, because a step divides Σ totals by Σ counts. The loop, the feeds and
the loader workers all ask it. A process that trains alone is the only rank. The arithmetic is in
`autobatch.planning`.

A split by size sorts the samples, the largest first, and cuts the sorted list into contiguous groups, one
micro-batch of each for every rank. The largest come first, because large blocks then find the allocator
unfragmented, and because a step that runs out of memory does so at once. Each group is dealt to all ranks, so
that they work on samples of like sizes at the same time, and the rank with the least work so far takes the
most of it. Every rank cuts for all of them, so that they agree without a message.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records import SizeCut
from autobatch.planning import FIXED_SHARE, cut_by_area, micro_batches, split_over_ranks
from autobatch.workload.order import GlobalBatch

Sizes = NDArray[np.float64]


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

    is_fair = True
    """True if the first micro-batch of a batch is drawn at random, so that its gradient is a fair sample."""

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
        cut: the limit of the longest samples, whose padded size bounds that of every micro-batch.
        rank: this rank.
        limits: the largest micro-batch of each rank, of samples of any size; nothing for one.
    """

    is_fair = False

    def __init__(self, *, sizes: Sizes, cut: SizeCut, rank: int = 0, limits: Sequence[int] = ()) -> None:
        super().__init__(rank, limits)
        self.sizes = sizes
        self.cut = cut
        self.largest = cut.max_micro_batch
        self._last: dict[tuple[int, int, tuple[int, ...]], list[list[MicroBatchIds]]] = {}

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """See `Split.parts`."""
        return self._of_batch(batch, self._limits_with(micro_batch))[self.rank]

    def rounds(self, batch: GlobalBatch) -> int:
        """See `Split.rounds`."""
        return max(map(len, self._of_batch(batch, self.limits)))

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `Split.halved`."""
        limit = int(self.limits_at(self.sizes[part.ids].max(keepdims=True), self.largest)[0])
        return min(micro_batch, math.ceil(len(part.ids) * self.largest / (2 * limit)))

    def of_longest(self, micro_batch: int) -> int:
        """See `Split.of_longest`."""
        return int(self.limits_at(np.array([self.cut.longest]), micro_batch)[0])

    def limits_at(self, sizes: Sizes, micro_batch: int) -> NDArray[np.int64]:
        """Return the largest micro-batch of samples up to each size."""
        # A sample may have no size.
        fitting = self.cut.micro_batch * (self.cut.longest / np.maximum(sizes, 1e-9))
        limits = np.clip(fitting, 1, self.largest).astype(np.int64) * micro_batch // self.largest
        return np.maximum(limits, np.int64(1))

    def fixed_area(self, micro_batch: int) -> float:
        """Return the cost of a micro-batch besides its area, in the same unit."""
        return FIXED_SHARE * self.of_longest(micro_batch) * self.cut.longest

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
                for of_rank in self._places(self.sizes[batch.ids], limits)
            ]
            while len(self._last) > 1:
                self._last.pop(next(iter(self._last)))
            self._last[key] = found
        return found

    def _places(self, own: Sizes, limits: list[int]) -> list[list[list[int]]]:
        """Return the places of the samples in each micro-batch of every rank; some may be empty."""
        # A stable sort: samples of one size keep their order.
        order = np.argsort(-own, kind="stable").tolist()
        together = np.sum([self.limits_at(own[order], limit) for limit in limits], axis=0)
        fixed = max(map(self.fixed_area, limits))
        ends = accumulate(cut_by_area(own[order], together, fixed=fixed, ranks=len(limits)))
        places = self._deal([order[start:end] for start, end in pairwise([0, *ends])], own, limits)
        # There is nothing to sort for in one micro-batch, and a loss over the batch may read the order.
        return [[list(range(len(own)))]] if list(map(len, places)) == [1] else places

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


def digest_of(sizes: Sizes) -> str:
    """Return a digest of the sizes of all samples, which tells whether a cut stays the same."""
    return hashlib.sha256(np.ascontiguousarray(sizes, dtype="<f8").tobytes()).hexdigest()[:16]
