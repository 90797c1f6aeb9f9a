"""The joint split of a batch by size over ranks: one cut of the whole batch, dealt to all ranks.

The sorted batch is cut into groups as `autobatch.workload.size_split` cuts it into micro-batches, and each
rank takes its share of every group. So the ranks work on samples of like sizes at the same time, and run as
many micro-batches as each other. Cutting each rank's part alone would leave ranks waiting for the one that
drew the largest samples. Ranks with one limit share the cost to one percent where arithmetic binds, by
`autobatch.workload.joint_cut`; ranks with unlike limits take shares in proportion to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from autobatch.core.records.plan import SizeCut
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.shares import RankSplit, shares
from autobatch.planning import micro_batches
from autobatch.workload.joint_cut import joint_cut
from autobatch.workload.order import GlobalBatch
from autobatch.workload.size_split import MEASURED_SHARE, Sizes, SizeSplit, cheapest_cut
from autobatch.workload.split import MicroBatchIds


class JointSizeSplit(RankSplit):
    """The micro-batches of one rank in a joint split by size; see `autobatch.workload.split.Split`.

    Args:
        split: has the sizes, and the limits of a rank for each size.
        rank: the rank.
        limits: the largest micro-batch of each rank, of samples of any size; changed after an out-of-memory
            error.
    """

    def __init__(self, split: SizeSplit, rank: int, limits: Sequence[int]) -> None:
        super().__init__(split, rank, limits)
        self._by_size = split
        self._last: tuple[object, tuple[list[MicroBatchIds], int]] | None = None

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """See `autobatch.workload.split.Split`; empty if the rank takes no sample."""
        return self._of_batch(
            batch, (*self.limits[: self._rank], micro_batch, *self.limits[self._rank + 1 :])
        )[0]

    def rounds(self, batch: GlobalBatch) -> int:
        """See `RankSplit.rounds`. Every rank cuts for all of them, so that they agree without a message."""
        return self._of_batch(batch, tuple(self.limits))[1]

    def _of_batch(self, batch: GlobalBatch, limits: tuple[int, ...]) -> tuple[list[MicroBatchIds], int]:
        """Return the micro-batches of this rank, and the most of any rank."""
        key = (batch.index, len(batch.ids), limits)
        # The loop, its feed and its engine ask for the same batch, one after the other.
        if self._last is None or self._last[0] != key:
            own = self._by_size.sizes[batch.ids]
            found = self._places(own, batch.index, limits)
            parts = [
                MicroBatchIds(batch.index, places, [batch.ids[place] for place in places])
                for places in found[self._rank]
                if places
            ]
            self._last = (key, (parts, max(map(len, found))))
        return self._last[1]

    def _places(self, own: Sizes, index: int, limits: Sequence[int]) -> list[list[list[int]]]:
        """Return the places of the samples in each micro-batch of every rank; some may be empty."""
        split, world = self._by_size, len(limits)
        of_longest = sum(split.of_longest(one) for one in limits)
        first = 0
        if split.measured_every and index % split.measured_every == 0 and len(own) > 1:
            # A fair draw for the noise, as in a split over one process.
            first = max(1, min(of_longest, len(own) // MEASURED_SHARE))
        order = (first + np.argsort(-own[first:], kind="stable")).tolist()
        groups = [list(range(first))] if first else []
        alone: list[list[list[int]]] = [[] for _ in limits]
        if split.cut.is_padded and split.cut.cost is not None and len(set(limits)) == 1:
            sorted_sizes = own[order]
            cut = joint_cut(sorted_sizes, split.limits(sorted_sizes, limits[0]), split.cut.cost, world)
            alone = [[[order[place] for place in group] for group in of_rank] for of_rank in cut]
        elif split.cut.is_padded:
            ends = np.cumsum(self._cut(own[order], limits)).tolist()
            groups += [order[start:end] for start, end in pairwise([0, *ends])]
        else:
            # The memory of samples that are joined follows the mean size of those that a rank is dealt.
            of_ranks = shares(len(order), limits)
            dealt = [_dealt(order, of_ranks, rank, first=0) for rank in range(world)]
            alone = [split.groups(own, one, limit) for one, limit in zip(dealt, limits, strict=True)]
        return [
            [*(self._part_of(rank, own, group, limits, n) for n, group in enumerate(groups)), *alone[rank]]
            for rank in range(world)
        ]

    def _cut(self, sizes: Sizes, limits: Sequence[int]) -> list[int]:
        """Cut a list of sizes, the largest first, into groups with a micro-batch for every rank."""
        split = self._by_size
        if split.cut.cost is None:
            return micro_batches(len(sizes), sum(split.of_longest(one) for one in limits))
        together = np.sum([split.limits(sizes, one) for one in limits], axis=0)
        return cheapest_cut(sizes, together, split.cut.cost, ranks=len(limits))

    def _part_of(
        self, rank: int, sizes: Sizes, group: list[int], limits: Sequence[int], number: int
    ) -> list[int]:
        """Return what a rank takes of a group of places."""
        largest = sizes[group].max(keepdims=True)
        of_ranks = shares(len(group), [int(self._by_size.limits(largest, one)[0]) for one in limits])
        return _dealt(group, of_ranks, rank, first=number % len(limits))


def _dealt(group: list[int], of_ranks: list[int], rank: int, *, first: int) -> list[int]:
    """Deal a group to the ranks in turns, so that the largest of each are alike; return what one gets.

    Args:
        group: the samples, the largest first.
        of_ranks: samples of each rank.
        rank: the rank.
        first: the rank that gets the largest sample.
    """
    world = len(of_ranks)
    order = [(first + place) % world for place in range(world)]
    turns = [one for turn in range(max(of_ranks)) for one in order if turn < of_ranks[one]]
    return [place for place, one in zip(group, turns, strict=True) if one == rank]


def agree_on_cut(ranks: Ranks, cut: SizeCut | None) -> SizeCut | None:
    """Return the cut by which all ranks split; all of them call it.

    Args:
        ranks: the ranks.
        cut: the cut of this rank; None to split by count.

    Returns:
        For every size the least limit of any rank, and the cost that rank 0 measured. None if a rank splits
        by count, or has other samples.
    """
    if ranks.world == 1:
        return cut
    found = [
        None if one is None else msgspec.convert(one, SizeCut)
        for one in ranks.gather(None if cut is None else msgspec.to_builtins(cut))
    ]
    cuts = [one for one in found if one is not None]
    if len(cuts) < ranks.world or len({one.digest for one in cuts}) > 1:
        return None
    knots = sorted({size for one in cuts for size in one.sizes})
    least = [min(_limit_at(one, size) for one in cuts) for size in knots]
    return msgspec.structs.replace(cuts[0], sizes=knots, micro_batches=least)


def _limit_at(cut: SizeCut, size: float) -> int:
    """Return the limit of a cut for samples up to a size: that of the next knot."""
    place = int(np.searchsorted(np.asarray(cut.sizes), size))
    return cut.micro_batches[min(place, len(cut.sizes) - 1)]
