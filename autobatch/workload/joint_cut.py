"""One cut of a batch over several ranks, so that each has the same work in as many micro-batches.

Each rank could cut its own share by size, but shares of equal counts differ in work. So the whole sorted list
is cut into groups of up to ranks times the limit, and each group is dealt to all ranks. All ranks then run
nearly equal samples at the same time, and equally many micro-batches, which collectives in each micro-batch
need (FSDP2). The cut needs nothing but the sizes, so every rank computes the same one on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records.plan import MicroBatchCost
from autobatch.workload.size_split import Sizes, followed, seconds_each

Limits = Sequence[int] | NDArray[np.int64]


def joint_cut(sizes: Sizes, limits: Limits, cost: MicroBatchCost, ranks: int) -> list[list[list[int]]]:
    """Cut a sorted list into micro-batches for several ranks.

    Args:
        sizes: sizes of the samples of a whole batch, the largest first.
        limits: the largest micro-batch of any one rank that may begin with each sample.
        cost: cost of a micro-batch.
        ranks: number of ranks, all equally fast.

    Returns:
        For each rank its micro-batches, equally many for all: places in the sorted list, ascending. The last
        ones of some ranks are empty if the limits leave fewer samples than ranks for them.
    """
    each = seconds_each(cost, sizes).tolist()
    cut: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    first = 0
    for count in _cut_for_all(each, limits, cost.fixed, ranks):
        hands = [list(range(start, first + count, ranks)) for start in range(first, first + ranks)]
        first += count
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
