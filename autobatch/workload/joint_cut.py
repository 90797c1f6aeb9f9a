"""One cut of a batch over several ranks, so that each has the same work.

Each rank could cut its own share by size, but shares of equal counts differ in work. So the whole batch is
cut at once. There are two ways, and both need nothing but the sizes, so that every rank computes the same
cut without talking to the others:

- share: each sample goes to the rank with the least work, the largest first. Each rank cuts its own samples.
- deal: the sorted list is cut into groups of up to ranks times the limit, and each group is dealt to all
  ranks. All ranks then run equally many micro-batches, of nearly equal samples at the same time. Collectives
  in each micro-batch need that (FSDP2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records import MicroBatchCost
from autobatch.workload.size_split import cheapest_cut, followed, seconds_each

Sizes = NDArray[np.float64]
Limits = Sequence[int] | NDArray[np.int64]
RankGroups = list[list[int]]
"""Micro-batches of a rank: places in the sorted list."""


def joint_cut(
    sizes: Sizes, limits: Limits, cost: MicroBatchCost, ranks: int, *, has_equal_counts: bool = False
) -> list[RankGroups]:
    """Cut a sorted list into micro-batches for several ranks, of which the slowest ends early.

    Args:
        sizes: sizes of the samples of a whole batch, the largest first.
        limits: the largest micro-batch of any one rank that may begin with each sample.
        cost: cost of a micro-batch.
        ranks: number of ranks, all equally fast.
        has_equal_counts: give all ranks equally many micro-batches. The last ones of some ranks are empty if
            the limits leave fewer samples than ranks for them.

    Returns:
        The micro-batches of each rank. Each holds places in the sorted list, ascending.
    """
    dealt = _deal(sizes, limits, cost, ranks)
    if has_equal_counts or ranks == 1:
        return dealt
    dealt = [[group for group in groups if group] for groups in dealt]
    shared = _share(sizes, limits, cost, ranks)
    return min(shared, dealt, key=lambda cut: max(rank_seconds(sizes, cost, cut)))


def rank_seconds(sizes: Sizes, cost: MicroBatchCost, cut: Sequence[RankGroups]) -> list[float]:
    """Return the cost of each rank."""
    each = seconds_each(cost, sizes)
    return [
        math.fsum(cost.fixed + len(group) * each[group[0]] for group in groups if group) for groups in cut
    ]


def _share(sizes: Sizes, limits: Limits, cost: MicroBatchCost, ranks: int) -> list[RankGroups]:
    """Give each sample to the rank with the least work, and cut the samples of each rank."""
    loads = [(0.0, rank) for rank in range(ranks)]
    own: list[list[int]] = [[] for _ in range(ranks)]
    for place, seconds in enumerate(seconds_each(cost, sizes).tolist()):
        load, rank = loads[0]
        own[rank].append(place)
        heapq.heapreplace(loads, (load + seconds, rank))
    limits = np.asarray(limits)
    return [_groups(places, cheapest_cut(sizes[places], limits[places], cost)) for places in own]


def _deal(sizes: Sizes, limits: Limits, cost: MicroBatchCost, ranks: int) -> list[RankGroups]:
    """Cut the list into groups for all ranks, and deal each group."""
    each = seconds_each(cost, sizes).tolist()
    cut: list[RankGroups] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for group in _groups(list(range(len(sizes))), _cut_for_all(each, limits, cost.fixed, ranks)):
        hands = [group[first::ranks] for first in range(ranks)]
        # The rank with the least work takes the most.
        hands.sort(key=lambda hand: len(hand) * each[hand[0]] if hand else 0.0, reverse=True)
        for rank, hand in zip(sorted(range(ranks), key=loads.__getitem__), hands, strict=True):
            cut[rank].append(hand)
            loads[rank] += cost.fixed + len(hand) * each[hand[0]] if hand else 0.0
    return cut


def _cut_for_all(each: list[float], limits: Limits, fixed: float, ranks: int) -> list[int]:
    """Cut the list into groups of least total cost, each of at least a sample per rank.

    A group costs what the rank with the most of its samples takes. If the limits leave no such cut, the last
    group is smaller.
    """
    count = len(each)
    hands = np.ceil(np.arange(1, count + 1) / ranks)
    best = np.zeros(count + 1)
    taken = np.zeros(count, dtype=np.int64)
    for has_small_tail in (False, True):
        for start in range(count - 1, -1, -1):
            most = min(int(limits[start]) * ranks, count - start)
            totals = each[start] * hands[:most] + best[start + 1 : start + most + 1]
            is_tail = has_small_tail and count - start < ranks
            totals[: most if is_tail else min(most, ranks)][:-1] = math.inf
            if most < ranks and not is_tail:
                totals[:] = math.inf
            taken[start] = chosen = int(totals.argmin()) + 1
            best[start] = fixed + totals[chosen - 1]
        if math.isfinite(best[0]):
            break
    return followed(taken)


def _groups(places: list[int], counts: Sequence[int]) -> RankGroups:
    groups, first = [], 0
    for count in counts:
        groups.append(places[first : first + count])
        first += count
    return groups
