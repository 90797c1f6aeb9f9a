"""Choice of samples for the check of the loss: cheap and expensive, rare and ordinary ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from autobatch.setup.attempt import TrainSetup
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import collate_samples, elements, fetch
from autobatch.workload.nested import tensors_of

CANDIDATES = 256
"""Samples that are read to choose from: a class of 2 % is missed by chance once in 170 times."""
SECONDS = 0.5
"""Time after which no more candidates are read."""
FIRST_CHUNK = 8
CHUNK = 32
EXTREMES = 16
"""Cheapest and most expensive samples among the candidates, if all costs are known."""


class SampleChoice:
    """Candidates of the training data, with their costs and their labels.

    Args:
        setup: has the data, and the costs of the samples if they are known.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self._workload = setup.workload
        self._known = setup.worst_case.known_costs
        self._costs: dict[int, float] = {}
        self._labels: dict[int, tuple[int, ...]] = {}
        count = len(setup.workload.train_data)  # type: ignore[arg-type]
        wanted = _candidates(count, self._known)
        start, first = setup.clock(), 0
        while first < len(wanted) and (not first or setup.clock() - start < SECONDS):
            stop = first + (CHUNK if first else FIRST_CHUNK)
            self._read(wanted[first:stop])
            first = stop

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self._costs)

    def ids(self, size: int) -> list[int]:
        """Return ``size`` candidates, sorted so that neighbours have similar costs and equal labels.

        Contiguous parts of them then differ as much as possible in what a wrong loss may weigh by.
        """
        order = list(self._costs)
        by_cost = sorted(order, key=lambda index: (self._costs[index], index))
        each = max(1, size // 8)
        chosen = dict.fromkeys([by_cost[0], by_cost[-1], *by_cost[:each], *by_cost[-each:]])
        chosen |= dict.fromkeys(self._rare(max(1, size // 16), size // 4))
        chosen |= dict.fromkeys(order)
        ids = list(chosen)[:size]
        return sorted(ids, key=lambda index: (self._costs[index], self._labels.get(index, ()), index))

    def _rare(self, each: int, limit: int) -> list[int]:
        """Return up to ``limit`` samples with the rarest labels, at most ``each`` of one label."""
        found: list[int] = []
        for labels in zip(*self._labels.values(), strict=False):
            counts = Counter(labels)
            if 2 * len(counts) > len(labels):
                continue  # numbers of samples, not classes
            for value, _ in sorted(counts.items(), key=lambda item: (item[1], item[0])):
                holders = (i for i, label in zip(self._labels, labels, strict=True) if label == value)
                found += [index for index, _ in zip(holders, range(each), strict=False)]
        return found[:limit]

    def _read(self, ids: Sequence[int]) -> None:
        samples = fetch(self._workload.train_data, ids)
        for index, sample in zip(ids, samples, strict=True):
            known = self._known.get(index)
            # Without size_of, which may be slow and has been asked in the process of the probe.
            self._costs[index] = float(elements(sample)) if known is None else known
        columns = _integer_columns(self._workload, samples)
        self._labels |= dict(zip(ids, zip(*columns, strict=True), strict=False))


def _candidates(count: int, known: dict[int, float]) -> list[int]:
    """Return candidates in the order of reading: extremes of known costs first, then random ones."""
    order = sorted(known, key=lambda index: (known[index], index))
    extremes = [*order[:EXTREMES], *order[-EXTREMES:]] if len(known) > 1 else [0, count - 1]
    differ = len(known) < 2 or known[order[0]] != known[order[-1]]
    more: Iterable[int] = random.Random(0).sample(range(count), min(count, CANDIDATES))
    few = extremes[:: max(1, len(extremes) // 4)] if differ else []
    return list(dict.fromkeys([*few, *more, *(extremes if differ else [])]))[:CANDIDATES]


def _integer_columns(workload: Workload, samples: list[object]) -> list[list[int]]:
    """Return the integer tensors of the collated samples that have one value per sample."""
    try:
        batch: Collated = collate_samples(list(samples), workload.collate, option="Workload(collate=…)")
    except Exception:  # the check itself collates too, and reports it
        return []
    return [
        tensor.tolist()
        for tensor in tensors_of(batch)
        if tensor.dim() == 1 and len(tensor) == len(samples) and not tensor.is_floating_point()
    ]
