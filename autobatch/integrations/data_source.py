"""Data of any kind for a loop that is not ours: passes over it, and its collated micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from autobatch.core.errors import InputError
from autobatch.core.records.plan import Plan
from autobatch.integrations.stream import (
    Piece,
    as_piece,
    concatenate_pieces,
    cut_into_batches,
    samples_of,
    split,
)
from autobatch.workload.contract import Collated, MapStyle, kind_of
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.order import GlobalBatchSampler

SampleT = TypeVar("SampleT")
Data: TypeAlias = MapStyle[SampleT] | Dataset[SampleT] | Iterable[SampleT]
"""Input of `autobatch.batches`: map-style data, samples, or a ``DataLoader``."""


class DataSource:
    """The user's data as passes of pieces, and how pieces are collated.

    Args:
        data: map-style data, samples or a ``DataLoader``.
        sampler: the order of an epoch of map-style data, as indices; None for a permutation per epoch.
        collate: makes a micro-batch out of samples; None for torch's default.
        batched: whether ``data`` yields batches; None to tell by ``batch_size`` or ``batch_sampler``.

    Raises:
        InputError: the data cannot be iterated, does not go with ``sampler`` or ``collate``, or is a loader
            that may yield samples or batches.
    """

    def __init__(
        self,
        data: Any,
        *,
        sampler: Iterable[int] | None,
        collate: Callable[[list[Any]], Collated] | None,
        batched: bool | None,
    ) -> None:
        if batched is None and _makes_no_batches(data):
            raise InputError(
                f"this {type(data).__name__} has batch_size=None, so its items may be samples or batches: "
                "write autobatch.batches(…, batched=True) for batches, batched=False for samples"
            )
        if batched is None:
            batched = any(getattr(data, name, None) is not None for name in ("batch_size", "batch_sampler"))
        has_items = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
        self.is_map_style = has_items and not batched and not isinstance(data, IterableDataset | Mapping)
        if not self.is_map_style and not hasattr(data, "__iter__"):
            raise InputError(
                f"autobatch.batches takes map-style data, samples or a DataLoader, found {kind_of(data)}"
            )
        if batched and collate is not None:
            raise InputError(
                "collate= makes batches out of samples, and this data already yields batches: give "
                "collate_fn= to the loader"
            )
        if sampler is not None and not self.is_map_style:
            raise InputError(
                f"sampler= needs map-style data (__getitem__ and __len__), found {kind_of(data)}: give the "
                "sampler to the loader"
            )
        self._data = data
        self._sampler = sampler
        self._collate = collate
        self.is_batched = batched

    def batches(
        self, plan: Plan, *, seed: int, steps: int | None, epochs: int | None, start: int
    ) -> tuple[Iterator[list[Any]], int | None]:
        """Draw the batches, from number ``start`` on.

        Returns:
            The indices or samples of each batch, or its pieces if the data yields batches; and the number of
            batches, None if it is unknown before the data ends.

        Raises:
            InputError: map-style data has too few samples.
        """
        if self.is_map_style and self._sampler is None:
            sampler = _sampler_of(len(self._data), plan, seed, steps=steps, epochs=epochs)
            return (batch.ids for batch in sampler.batches(start)), max(0, sampler.total - start)
        cut = cut_into_batches(self._epoch, plan.target_batch, epochs=epochs, last_batch=plan.last_batch)
        total = max(0, steps - start) if steps is not None and epochs is None else None
        drawn = itertools.islice(cut, start, steps)
        return (drawn if self.is_batched else ([one.content for one in pieces] for pieces in drawn)), total

    def count(self, drawn: list[Any]) -> int:
        """Count the samples of a drawn batch."""
        return samples_of(drawn) if self.is_batched else len(drawn)

    def part(self, drawn: list[Any], first: int, count: int) -> list[Any]:
        """Return a part of a drawn batch: ``count`` samples from place ``first`` on."""
        if self.is_batched:
            return list(split(drawn, [first, count]))[1]
        return drawn[first : first + count]

    def micro_batches(self, drawn: list[Any], sizes: list[int]) -> Iterator[tuple[Collated, int]]:
        """Collate a drawn batch in micro-batches of these sizes, and yield each with its number of samples.

        Batches of a loader that differ in form give more micro-batches.
        """
        if self.is_batched:
            for pieces in split(drawn, sizes):
                yield from concatenate_pieces(pieces)
            return
        first = 0
        for size in sizes:
            yield self.collate(self.samples_of(drawn[first : first + size])), size
            first += size

    def samples_of(self, drawn: list[Any]) -> list[Any]:
        """Return the samples of a drawn batch, or of a part of it; not for batches of a loader."""
        return fetch(self._data, drawn, name="data") if self.is_map_style else drawn

    def collate(self, samples: list[Any]) -> Collated:
        """Collate samples."""
        return collate_samples(samples, self._collate, option="autobatch.batches(collate=…)")

    def _epoch(self) -> Iterator[Piece]:
        """Begin one pass over the data, or over its indices."""
        if self.is_batched:
            return map(as_piece, self._data)
        return (Piece(one, 0, 1) for one in (self._data if self._sampler is None else self._sampler))


def _makes_no_batches(data: Any) -> bool:
    """Check for a loader that yields what its data yield."""
    return isinstance(data, DataLoader) and data.batch_size is None and data.batch_sampler is None


def _sampler_of(
    samples: int, plan: Plan, seed: int, *, steps: int | None, epochs: int | None
) -> GlobalBatchSampler:
    if not samples:
        raise InputError("the data has 0 samples: at least 1 is needed")
    if plan.last_batch == "drop" and samples < plan.target_batch:
        raise InputError(
            f"last_batch='drop' leaves no batch, because the data has {samples} samples and the target "
            f"batch is {plan.target_batch}: use 'carry' or 'flush' to keep them"
        )
    return GlobalBatchSampler(
        samples=samples,
        target_batch=plan.target_batch,
        seed=seed,
        steps=steps,
        epochs=epochs,
        last_batch=plan.last_batch,
    )
