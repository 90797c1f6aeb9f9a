"""Samples for the check of the loss: chosen by cost and label, and collated as a batch and as its parts.

If the collate function gives the same result twice, the parts are collated as training collates them. If it
draws at random (masks of a masked language model), the parts are cut from the whole along dimension 0.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from autobatch.core.errors import InputError
from autobatch.rehearsal.setup import Setup
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import collate_samples, elements, fetch, shallow_copies
from autobatch.workload.nested import (
    PLAIN,
    children_of,
    concatenate,
    cut,
    is_column,
    samples_along,
    signature,
    tensors_of,
)
from autobatch.workload.rng import seed_everything

CANDIDATES = 256
"""Samples that are read to choose from: a class of 2 % is missed by chance once in 170 times."""
SECONDS = 0.5
"""Time after which no more candidates are read."""
CHUNK = 8
"""Samples that are read before the time is asked for again."""
EXTREMES = 16
"""Cheapest and most expensive samples among the candidates, if all costs are known."""


class Part(NamedTuple):
    """Some samples of a batch, collated."""

    batch: Collated
    size: int
    first: int
    """Place of the first of them in the batch."""


class SampleChoice:
    """Candidates of the training data, with their costs and their labels."""

    def __init__(self, setup: Setup) -> None:
        self._workload = setup.workload
        self._known = setup.worst_case.known_costs
        self._costs: dict[int, float] = {}
        self._labels: dict[int, tuple[int, ...]] = {}
        count = len(setup.workload.train_data)  # type: ignore[arg-type]
        wanted = _candidates(count, self._known)
        start, first = setup.clock(), 0
        while first < len(wanted) and (not first or setup.clock() - start < SECONDS):
            self._read(wanted[first : first + CHUNK])
            first += CHUNK

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


class SplitSamples(NamedTuple):
    """A collated batch and its parts."""

    whole: Collated
    samples: int
    collated: list[Part] | None
    """Parts that were collated alone; None if that would give them another content than in the whole."""
    cut: list[Part] | None
    """Parts that were cut from the whole; None if it cannot be cut."""

    @property
    def parts(self) -> list[Part] | None:
        """The parts to compare; None if there are none with the content of the whole."""
        return self.collated or self.cut


def collate_split(workload: Workload, samples: Sequence[Any], sizes: Sequence[int]) -> SplitSamples:
    """Collate samples as a whole and as parts of the given sizes.

    Raises:
        InputError: the samples cannot be collated; the message has the shapes found.
    """
    whole = _collated(workload, samples, seed=1)
    is_same = _is_same(whole, _collated(workload, samples, seed=2))
    parts = [
        Part(_collated(workload, samples[first : first + size], seed=1), size, first)
        for first, size in _places(sizes)
    ]
    one = parts[0]
    can_cut = _has_samples_first(whole, len(samples)) and _has_samples_first(one.batch, one.size)
    can_cut = can_cut and list(_plain_values(whole)) == list(_plain_values(one.batch))
    cut_parts = cut_split(whole, sizes).cut if can_cut else None
    return SplitSamples(whole, len(samples), parts if is_same else None, cut_parts)


def cut_split(whole: Collated, sizes: Sequence[int]) -> SplitSamples:
    """Cut a collated batch into parts of the given sizes."""
    parts = [Part(cut(whole, slice(first, first + size)), size, first) for first, size in _places(sizes)]
    return SplitSamples(whole, sum(sizes), None, parts)


def join_parts(parts: Sequence[tuple[Collated, int]]) -> tuple[Collated, list[int]]:
    """Concatenate collated micro-batches of one form, that of most samples.

    Returns:
        The batch, and the samples of each micro-batch in it; no sizes if none has its samples in dimension 0.
    """
    forms: dict[str, list[tuple[Collated, int]]] = {}
    for batch, size in parts:
        if _has_samples_first(batch, size):
            forms.setdefault(repr(signature(batch)), []).append((batch, size))
    most = max(forms.values(), key=lambda own: sum(size for _, size in own), default=[])
    return concatenate([batch for batch, _ in most]) if most else None, [size for _, size in most]


def _collated(workload: Workload, samples: Sequence[Any], seed: int) -> Collated:
    seed_everything(seed)
    return collate_samples(shallow_copies(samples), workload.collate)


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the place of the first sample of each part, and its size."""
    return zip(accumulate(sizes, initial=0), sizes, strict=False)


def _candidates(count: int, known: dict[int, float]) -> list[int]:
    """Return candidates in the order of reading: the extremes of known costs, random ones, more extremes."""
    order = sorted(known, key=lambda index: (known[index], index))
    drawn = random.Random(0).sample(range(count), min(count, CANDIDATES))
    first, rest = drawn[: CANDIDATES - 2 * EXTREMES], drawn[CANDIDATES - 2 * EXTREMES :]
    ids = [*order[:1], *order[-1:], *first, *order[:EXTREMES], *order[-EXTREMES:], *rest]
    return list(dict.fromkeys(ids))[:CANDIDATES]


def _integer_columns(workload: Workload, samples: list[object]) -> list[list[int]]:
    """Return the integer tensors of the collated samples that have one value per sample."""
    try:
        batch: Collated = collate_samples(shallow_copies(samples), workload.collate)
    except Exception:  # the check itself collates too, and reports it
        return []
    return [
        tensor.tolist()
        for tensor in tensors_of(batch)
        if tensor.dim() == 1 and len(tensor) == len(samples) and not tensor.is_floating_point()
    ]


def _has_samples_first(batch: Collated, samples: int) -> bool:
    """Check that dimension 0 of each part of a batch counts its samples."""
    try:
        return set(samples_along(batch)) == {samples}
    except InputError:
        return False


def _plain_values(value: Any) -> Iterator[Any]:
    """Yield the values of a collated batch that belong to all of its samples."""
    if isinstance(value, PLAIN):
        yield value
    elif not is_column(value):
        for one in children_of(value):
            yield from _plain_values(one)


def _is_same(one: Any, other: Any) -> bool:
    """Check that two collated batches have the same tensors, with NaN at the same places, and values."""
    mine, others = list(tensors_of(one)), list(tensors_of(other))
    return (
        [(a.shape, a.dtype) for a in mine] == [(b.shape, b.dtype) for b in others]
        and all(bool((a.eq(b) | (a.isnan() & b.isnan())).all()) for a, b in zip(mine, others, strict=True))
        and list(_plain_values(one)) == list(_plain_values(other))
    )
