"""Data of any kind for a loop of the user's own: the samples of each batch, and its collated micro-batches.

All samples of a batch are drawn before its first micro-batch runs. Only then is it known whether the batch is
short, and into which sizes it splits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from autobatch.core.errors import InputError
from autobatch.core.records import Plan
from autobatch.workload.contract import Collated, MapStyle, kind_of
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.nested import ADVICE, concatenate, cut, samples_along, signature
from autobatch.workload.order import GlobalBatchSampler, LastBatch

SampleT = TypeVar("SampleT")
Data: TypeAlias = MapStyle[SampleT] | Dataset[SampleT] | Iterable[SampleT]
"""Input of `autobatch.batches`: map-style data, samples, or a ``DataLoader``."""


class Length(NamedTuple):
    """Length of a run."""

    steps: int | None
    """Optimizer steps, those before ``start`` included; None for no limit."""
    epochs: int | None
    """Passes over the data; None for no limit."""
    start: int = 0
    """Batches to skip at the front."""

    def steps_left(self) -> int | None:
        """Return the number of batches if ``steps`` alone decides; None if the data decide."""
        return None if self.steps is None or self.epochs is not None else max(0, self.steps - self.start)


class Samples:
    """Map-style data, or an iterable of samples. A batch is drawn as indices or as samples.

    Args:
        data: the user's data.
        sampler: the order of an epoch of map-style data, as indices; None for a permutation per epoch.
        collate: makes a micro-batch out of samples; None for torch's default.
        is_map_style: whether the data have an index.
    """

    def __init__(
        self,
        data: Any,
        *,
        sampler: Iterable[int] | None,
        collate: Callable[[list[Any]], Collated] | None,
        is_map_style: bool,
    ) -> None:
        self._data = data
        self._sampler = sampler
        self._collate = collate
        self._is_map_style = is_map_style

    def batches(self, plan: Plan, length: Length, seed: int) -> tuple[Iterator[list[Any]], int | None]:
        """Draw the batches of a run.

        Returns:
            The drawn elements of each batch, and the number of batches, None if it is unknown.

        Raises:
            InputError: the data have no sample, or too few for any batch.
        """
        if self._is_map_style and self._sampler is None:
            sampler = _sampler_of(len(self._data), plan, seed, length)
            return (batch.ids for batch in sampler.batches(length.start)), max(
                0, sampler.total - length.start
            )
        elements = self._data if self._sampler is None else self._sampler
        drawn = _cut_epochs(lambda: (Piece(one, 0, 1) for one in elements), plan, length)
        return ([one.content for one in pieces] for pieces in drawn), length.steps_left()

    def count(self, drawn: list[Any]) -> int:
        """Count the samples of a drawn batch."""
        return len(drawn)

    def part(self, drawn: list[Any], first: int, count: int) -> list[Any]:
        """Return a part of a drawn batch: ``count`` samples from place ``first`` on."""
        return drawn[first : first + count]

    def micro_batches(self, drawn: list[Any], sizes: list[int]) -> Iterator[tuple[Collated, int]]:
        """Collate a drawn batch in micro-batches of these sizes; yield each with its number of samples."""
        first = 0
        for size in sizes:
            yield self.collate(self.samples_of(drawn[first : first + size])), size
            first += size

    def samples_of(self, drawn: list[Any]) -> list[Any]:
        """Return the samples of a drawn batch, or of a part of it."""
        return fetch(self._data, drawn, name="data") if self._is_map_style else drawn

    def collate(self, samples: list[Any]) -> Collated:
        """Collate samples."""
        return collate_samples(samples, self._collate, option="autobatch.batches(collate=…)")


class LoaderBatches:
    """The collated batches of a loader, of any size, which are cut and concatenated along dimension 0.

    A batch is drawn as pieces of the loader's batches. The methods are those of `Samples`.
    """

    def __init__(self, loader: Iterable[Collated]) -> None:
        self._loader = loader

    def batches(self, plan: Plan, length: Length, seed: int) -> tuple[Iterator[list[Any]], int | None]:
        """See `Samples`."""
        del seed
        return _cut_epochs(lambda: map(as_piece, self._loader), plan, length), length.steps_left()

    def count(self, drawn: list[Any]) -> int:
        """See `Samples`."""
        return samples_of(drawn)

    def part(self, drawn: list[Any], first: int, count: int) -> list[Any]:
        """See `Samples`."""
        return list(split(drawn, [first, count]))[1]

    def micro_batches(self, drawn: list[Any], sizes: list[int]) -> Iterator[tuple[Collated, int]]:
        """See `Samples`. Batches of the loader that differ in form give more micro-batches."""
        for pieces in split(drawn, sizes):
            yield from concatenate_pieces(pieces)


def open_source(
    data: Any,
    *,
    sampler: Iterable[int] | None,
    collate: Callable[[list[Any]], Collated] | None,
    batched: bool | None,
) -> Samples | LoaderBatches:
    """Return the source of the user's data.

    Args:
        data: map-style data, samples or a ``DataLoader``.
        sampler: the order of an epoch of map-style data, as indices; None for a permutation per epoch.
        collate: makes a micro-batch out of samples; None for torch's default.
        batched: whether ``data`` yields batches; None to tell by ``batch_size`` or ``batch_sampler``.

    Raises:
        InputError: the data cannot be iterated, does not go with ``sampler`` or ``collate``, or is a loader
            that may yield samples or batches.
    """
    if batched is None and _makes_no_batches(data):
        raise InputError(
            f"this {type(data).__name__} has batch_size=None, so its items may be samples or batches: "
            "write autobatch.batches(…, batched=True) for batches, batched=False for samples"
        )
    if batched is None:
        batched = any(getattr(data, name, None) is not None for name in ("batch_size", "batch_sampler"))
    has_items = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
    is_map_style = has_items and not batched and not isinstance(data, IterableDataset | Mapping)
    if not is_map_style and not hasattr(data, "__iter__"):
        raise InputError(
            f"autobatch.batches takes map-style data, samples or a DataLoader, found {kind_of(data)}"
        )
    if batched and collate is not None:
        raise InputError(
            "collate= makes batches out of samples, and this data already yields batches: give "
            "collate_fn= to the loader"
        )
    if sampler is not None and not is_map_style:
        raise InputError(
            f"sampler= needs map-style data (__getitem__ and __len__), found {kind_of(data)}: give the "
            "sampler to the loader"
        )
    if batched:
        return LoaderBatches(data)
    return Samples(data, sampler=sampler, collate=collate, is_map_style=is_map_style)


class Piece(NamedTuple):
    """Samples ``first`` to ``stop`` of an element of a stream; a single sample is a piece of one."""

    content: Any
    first: int
    stop: int


def cut_into_batches(
    epoch: Callable[[], Iterable[Piece]], target: int, *, epochs: int | None, last_batch: LastBatch
) -> Iterator[list[Piece]]:
    """Cut a stream into batches.

    Args:
        epoch: begins a pass over the data.
        target: samples per batch.
        epochs: passes; None for no limit.
        last_batch: what happens to samples that remain at the end of an epoch.

    Yields:
        The pieces of each batch, ``target`` samples together, or fewer if the data ends.

    Raises:
        InputError: a pass gives no sample, or too few for any batch.
    """
    batch: list[Piece] = []
    room = target
    for number in itertools.count() if epochs is None else range(epochs):
        samples = 0
        for piece in epoch():
            content, first, stop = piece
            samples += stop - first
            while first < stop:
                end = min(stop, first + room)
                batch.append(Piece(content, first, end))
                room -= end - first
                first = end
                if not room:
                    yield batch
                    batch, room = [], target
        _check_epoch(number, samples, target, last_batch)
        if last_batch == "flush" and batch:
            yield batch
        if last_batch != "carry":
            batch, room = [], target
    if batch:
        yield batch


def split(pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[list[Piece]]:
    """Split a batch's pieces into micro-batches of these sizes, whose sum is the batch's samples."""
    queue = iter(pieces)
    rest: Piece | None = None
    for size in sizes:
        taken, room = [], size
        while room:
            piece = next(queue) if rest is None else rest
            end = min(piece.stop, piece.first + room)
            taken.append(piece._replace(stop=end))
            room -= end - piece.first
            rest = piece._replace(first=end) if end < piece.stop else None
        yield taken


def samples_of(pieces: Iterable[Piece]) -> int:
    """Count the samples of all pieces."""
    return sum(piece.stop - piece.first for piece in pieces)


def as_piece(batch: Collated) -> Piece:
    """Wrap a whole batch of a loader in a piece.

    Raises:
        InputError: the parts of the batch differ in their number of samples, or a part cannot be cut.
    """
    sizes = sorted(set(samples_along(batch)))
    if len(sizes) != 1:
        found = f"sizes along dimension 0: {', '.join(map(str, sizes))}" if sizes else "it holds no samples"
        raise InputError(f"a batch of the loader cannot be cut into micro-batches ({found}): {ADVICE}")
    return Piece(batch, 0, sizes[0])


def concatenate_pieces(pieces: Sequence[Piece]) -> Iterator[tuple[Collated, int]]:
    """Concatenate pieces of batches along dimension 0, and yield each result with its number of samples.

    Batches that differ in form, for example padded to different lengths, are not concatenated. They follow
    one another, which changes only the number of micro-batches.
    """
    for _, group in itertools.groupby(pieces, key=lambda piece: signature(piece.content)):
        parts = list(group)
        contents = [cut(piece.content, slice(piece.first, piece.stop)) for piece in parts]
        yield contents[0] if len(contents) == 1 else concatenate(contents), samples_of(parts)


def _check_epoch(number: int, samples: int, target: int, last_batch: LastBatch) -> None:
    if not samples and number:
        raise InputError(
            f"the data gave no sample in epoch {number + 1}: give data that can be iterated again, which an "
            "iterator cannot, or ask for fewer steps"
        )
    if not samples:
        raise InputError("the data gave no sample: at least 1 is needed")
    if last_batch == "drop" and samples < target:
        raise InputError(
            f"last_batch='drop' leaves no batch, because an epoch has {samples} samples and the target "
            f"batch is {target}: use 'carry' or 'flush' to keep them"
        )


def _cut_epochs(epoch: Callable[[], Iterable[Piece]], plan: Plan, length: Length) -> Iterator[list[Piece]]:
    """Cut passes over data without an index into the batches of a run."""
    drawn = cut_into_batches(epoch, plan.target_batch, epochs=length.epochs, last_batch=plan.last_batch)
    return itertools.islice(drawn, length.start, length.steps)


def _makes_no_batches(data: Any) -> bool:
    """Check for a loader that yields what its data yield."""
    return isinstance(data, DataLoader) and data.batch_size is None and data.batch_sampler is None


def _sampler_of(samples: int, plan: Plan, seed: int, length: Length) -> GlobalBatchSampler:
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
        steps=length.steps,
        epochs=length.epochs,
        last_batch=plan.last_batch,
    )
