"""Shares of a batch: which rank takes how many samples, by the micro-batch that fits on each.

A step takes the fewest micro-batches that all ranks together allow: k = ⌈T ÷ Σ limits⌉. Within k micro-
batches of its limit, each rank takes the same number of samples, so that a small GPU takes what it can and
the others take the rest evenly. Shares sum to exactly T; a rank may take none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import MicroBatchIds, Split

CLOSE_BUDGETS = 0.02
"""Relative difference of the budgets of two GPUs of one kind."""


class Place(NamedTuple):
    """The memory that a rank trains in."""

    device: str
    """Name of the device."""
    total_bytes: int
    budget_bytes: int


def shares(samples: int, limits: Sequence[int]) -> list[int]:
    """Share samples among ranks as evenly as their limits allow; what is left over goes to the largest.

    Args:
        samples: samples of a batch.
        limits: the largest micro-batch of each rank.
    """
    count = math.ceil(samples / sum(limits))
    # The smallest ranks are filled first. Of equal ranks the last is, so that the first gets what is left.
    order = sorted(range(len(limits)), key=lambda rank: (limits[rank], -rank))
    found, left = [0] * len(limits), samples
    for number, rank in enumerate(order):
        found[rank] = min(count * limits[rank], left // (len(limits) - number))
        left -= found[rank]
    return found


def kinds_of(places: Sequence[Place]) -> list[int]:
    """Return the kind of each rank, named by the first rank of it: one device, and close budgets."""
    firsts: list[int] = []
    kinds: list[int] = []
    for rank, place in enumerate(places):
        kind = next((one for one in firsts if _are_alike(places[one], place)), rank)
        if kind == rank:
            firsts.append(rank)
        kinds.append(kind)
    return kinds


def least_of_each_kind(limits: Sequence[int], kinds: Sequence[int]) -> list[int]:
    """Return the limits with that of every rank lowered to the least of its kind."""
    least: dict[int, int] = {}
    for limit, kind in zip(limits, kinds, strict=True):
        least[kind] = min(limit, least.get(kind, limit))
    return [least[kind] for kind in kinds]


class RankSplit:
    """The micro-batches of one rank: the slice of a batch that is its share, split in turn.

    Args:
        split: splits the slice.
        rank: the rank.
        limits: the largest micro-batch of each rank; changed after an out-of-memory error.
    """

    def __init__(self, split: Split, rank: int, limits: Sequence[int]) -> None:
        self._split = split
        self._rank = rank
        self.limits = list(limits)

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """See `Split.parts`; empty if the rank takes no sample."""
        of_ranks = shares(
            len(batch.ids), [*self.limits[: self._rank], micro_batch, *self.limits[self._rank + 1 :]]
        )
        start = sum(of_ranks[: self._rank])
        own = GlobalBatch(batch.index, batch.epoch, batch.ids[start : start + of_ranks[self._rank]])
        parts = self._split.parts(own, micro_batch)
        return [part._replace(places=_moved(part.places, start)) for part in parts] if start else parts

    def rounds(self, batch: GlobalBatch) -> int:
        """Return the most micro-batches that any rank runs of a batch."""
        of_ranks = zip(shares(len(batch.ids), self.limits), self.limits, strict=True)
        return max(math.ceil(share / limit) for share, limit in of_ranks)

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `Split.halved`."""
        return self._split.halved(part, micro_batch)

    def of_longest(self, micro_batch: int) -> int:
        """See `Split.of_longest`."""
        return self._split.of_longest(micro_batch)


def _moved(places: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(places, range):
        return range(places.start + by, places.stop + by, places.step)
    return [by + place for place in places]


def _are_alike(one: Place, other: Place) -> bool:
    is_same = (one.device, one.total_bytes) == (other.device, other.total_bytes)
    return is_same and math.isclose(one.budget_bytes, other.budget_bytes, rel_tol=CLOSE_BUDGETS)
