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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.core.records import Plan, SizeCut
from autobatch.planning import FIXED_SHARE, cut_by_area, micro_batches, split_over_ranks
from autobatch.workload.data_digest import digest_of
from autobatch.workload.order import GlobalBatch

Sizes = NDArray[np.float64]


class MicroBatchIds(NamedTuple):
    """The sample ids of a micro-batch."""

    batch_index: int
    """Number of its batch in the run."""
    places: Sequence[int]
    """Place of each sample in the batch as it was drawn, which seeds its random draws."""
    ids: list[int]


@dataclass
class Split:
    """Micro-batches of equal counts, in the order of the batch; the counts differ by at most one.

    One number, ``micro_batch``, shrinks a split after an out-of-memory error.
    """

    rank: int = 0
    """This rank."""
    world: int = 1
    """Number of ranks, which share the batch."""
    multiple: int = 1
    """Number whose multiples all micro-batches are, but for the last one of a batch."""

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """Return the micro-batches of this rank; empty if it takes no sample."""
        return self.of_ranks(batch, micro_batch)[self.rank]

    def rounds(self, batch: GlobalBatch, micro_batch: int) -> int:
        """Return the most micro-batches that any rank runs of a batch."""
        return max(map(len, self.of_ranks(batch, micro_batch)))

    def of_ranks(self, batch: GlobalBatch, micro_batch: int) -> list[list[MicroBatchIds]]:
        """Return the micro-batches of every rank, each of at most ``micro_batch`` samples."""
        of_ranks: list[list[MicroBatchIds]] = []
        first = 0
        for share in split_over_ranks(len(batch.ids), self.world, self.multiple):
            of_ranks.append([])
            for size in micro_batches(share, micro_batch, self.multiple):
                places = range(first, first + size)
                of_ranks[-1].append(MicroBatchIds(batch.index, places, batch.ids[first : first + size]))
                first += size
        return of_ranks

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """Return the ``micro_batch`` that halves a part, which ran out of memory."""
        del micro_batch
        return self.multiple * math.ceil(len(part.ids) / self.multiple / 2)

    def of_longest(self, micro_batch: int) -> int:
        """Return the largest micro-batch of the most expensive samples."""
        return micro_batch


@dataclass(kw_only=True)
class SizeSplit(Split):
    """A split by size.

    Its ``micro_batch`` is the largest micro-batch of samples of any size. If it shrinks, the limits for all
    sizes shrink in proportion.
    """

    sizes: Sizes
    """Size of each sample of the data, by its index."""
    cut: SizeCut
    """The limit of the longest samples, whose padded size bounds that of every micro-batch."""
    _last: tuple[object, list[list[MicroBatchIds]]] = field(default=(None, []), init=False, repr=False)
    """The latest answer, and the question: a loop, its feed and its engine ask one after the other."""

    @property
    def largest(self) -> int:
        """The ``micro_batch`` of a split that has not shrunk."""
        return self.cut.max_micro_batch

    def of_ranks(self, batch: GlobalBatch, micro_batch: int) -> list[list[MicroBatchIds]]:
        """See `Split.of_ranks`."""
        question = (batch.index, len(batch.ids), micro_batch)
        if question != self._last[0]:
            of_ranks = self._places(self.sizes[batch.ids], micro_batch)
            self._last = (
                question,
                [
                    [MicroBatchIds(batch.index, part, [batch.ids[place] for place in part]) for part in own]
                    for own in of_ranks
                ],
            )
        return self._last[1]

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `Split.halved`."""
        limit = int(self._limits_at(self.sizes[part.ids].max(keepdims=True), self.largest)[0])
        return min(micro_batch, math.ceil(len(part.ids) * self.largest / (2 * limit)))

    def of_longest(self, micro_batch: int) -> int:
        """See `Split.of_longest`."""
        return int(self._limits_at(np.array([self.cut.longest]), micro_batch)[0])

    def fixed_area(self, micro_batch: int) -> float:
        """Return the cost of a micro-batch besides its area, in the same unit."""
        return FIXED_SHARE * self.of_longest(micro_batch) * self.cut.longest

    def _limits_at(self, sizes: Sizes, micro_batch: int) -> NDArray[np.int64]:
        """Return the largest micro-batch of samples up to each size."""
        # A sample may have no size.
        fitting = self.cut.micro_batch * (self.cut.longest / np.maximum(sizes, 1e-9))
        limits = np.clip(fitting, 1, self.largest).astype(np.int64) * micro_batch // self.largest
        return np.maximum(limits, np.int64(1))

    def _places(self, own: Sizes, micro_batch: int) -> list[list[list[int]]]:
        """Return the places of the samples in each micro-batch of every rank."""
        # A stable sort: samples of one size keep their order.
        order = np.argsort(-own, kind="stable").tolist()
        together = self.world * self._limits_at(own[order], micro_batch)
        fixed = self.fixed_area(micro_batch)
        ends = accumulate(cut_by_area(own[order], together, fixed=fixed, ranks=self.world))
        places: list[list[list[int]]] = [[] for _ in range(self.world)]
        work = [0.0] * self.world
        for start, end in pairwise([0, *ends]):
            # The rank with the least work so far takes the largest sample, and the most of the group.
            for turn, rank in enumerate(sorted(range(self.world), key=work.__getitem__)):
                if hand := order[start + turn : end : self.world]:
                    places[rank].append(hand)
                    work[rank] += fixed + len(hand) * float(own[hand[0]])
        # There is nothing to sort for in one micro-batch.
        return [[list(range(len(own)))]] if list(map(len, places)) == [1] else places


def split_of(plan: Plan, read_sizes: Callable[[], Sizes | None], *, rank: int, world: int) -> Split:
    """Return the split of a rank in a plan.

    ``read_sizes`` returns the sizes of all samples, None if that takes too long.

    Raises:
        InputError: the plan cuts by size, and the sizes of the samples are not those that it was made for.
    """
    cut = plan.size_cut
    if cut is None:
        return Split(rank=rank, world=world, multiple=plan.multiple)
    sizes = read_sizes()
    if sizes is None or digest_of(sizes) != cut.digest:
        raise InputError(
            "the sizes of the training samples are not those that the plan was made for, so its batches "
            "would be cut at other places: give the same data, or use --split count"
        )
    return SizeSplit(sizes=sizes, cut=cut, rank=rank, world=world)
