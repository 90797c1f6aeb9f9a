"""Data of any kind for a loop of the user's own: the samples of each batch, and its collated micro-batches.

All samples of a batch are drawn before its first micro-batch runs. Only then is it known whether the batch is
short, and into which sizes it splits.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from autobatch.core.errors import InputError
from autobatch.core.records import Plan
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.watch import ranks_in_words
from autobatch.workload.contract import BatchFunction, Collated, MapStyle, kind_of, loader_within
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.data_digest import check_same_data, digest_data, digest_of
from autobatch.workload.nested import ADVICE, concatenate, cut, map_tensors, samples_along, signature
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.streams import DrawnBatches

WHOLE = (
    "Every rank reads all of the data and trains on its part of each batch, so nothing may split or shuffle "
    "them by rank"
)
SampleT = TypeVar("SampleT")
Data: TypeAlias = MapStyle[SampleT] | Dataset[SampleT] | Iterable[SampleT]
"""Input of `autobatch.batches`: map-style data, samples, or a ``DataLoader``."""


class Piece(NamedTuple):
    """Samples ``first`` to ``stop`` of a batch of a loader or of a list."""

    content: Any
    """The batch of a loader, or a list of samples or of their indices."""
    first: int
    stop: int


class Source(NamedTuple):
    """The pieces of each batch of a run, and how micro-batches are made of them."""

    batches: Iterator[list[Piece]]
    total: int | None
    """Number of batches; None if only the data know."""
    read: Callable[[list[Piece]], list[Any]]
    """Returns the samples of pieces; batches of a loader stay pieces."""
    collate: Callable[[list[Any]], list[tuple[Collated, int]]]
    """Makes a micro-batch, with its number of samples; several of a loader's batches that differ in form."""
    has_samples: bool
    """False for batches of a loader."""
    is_map_style: bool = False

    def micro_batches(self, pieces: list[Piece], sizes: list[int]) -> Iterator[tuple[Collated, int]]:
        """Yield micro-batches of these sizes, whose sum is that of the pieces."""
        for one in split(pieces, sizes):
            yield from self.collate(self.read(one))


def open_source(
    data: Any,
    plan: Plan,
    *,
    steps: int | None,
    epochs: int | None,
    start: int,
    seed: int,
    sampler: Iterable[int] | None,
    collate: Callable[[list[Any]], Collated] | None,
    batched: bool | None,
    batch_dim: int,
) -> Source:
    """Open the user's data; the arguments are those of `autobatch.batches`.

    Raises:
        InputError: the data cannot be iterated, does not go with ``sampler`` or ``collate``, or is a loader
            that may yield samples or batches.
    """
    if isinstance(data, BatchFunction):
        data, batched = DrawnBatches(data.function, plan.target_batch, seed), True
    if batched is None:
        batched = _yields_batches(data)
    has_items = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
    is_map_style = has_items and not batched and not isinstance(data, IterableDataset | Mapping)
    if not is_map_style and not hasattr(data, "__iter__"):
        raise InputError(
            f"autobatch.batches takes map-style data, samples or a DataLoader, found {kind_of(data)}"
        )
    if batch_dim and not batched:
        raise InputError(
            f"batch_dim={batch_dim} is for data that yield batches, and this data yields samples: let "
            "collate= stack them along that dimension"
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
    if is_map_style and sampler is None:
        _check_epoch(len(data), plan)
        order = GlobalBatchSampler(
            samples=len(data),
            target_batch=plan.target_batch,
            seed=seed,
            steps=steps,
            epochs=epochs,
            last_batch=plan.last_batch,
        )
        drawn: Iterator[list[Piece]] = (
            [Piece(batch.ids, 0, len(batch.ids))] for batch in order.batches(start)
        )
        total: int | None = max(0, order.total - start)
    else:
        elements = data if sampler is None else sampler
        piece = partial(as_piece, batch_dim=batch_dim) if batched else _piece_of_sample
        drawn = itertools.islice(_cut_epochs(lambda: map(piece, elements), plan, epochs), start, steps)
        total = None if steps is None or epochs is not None else max(0, steps - start)
    if batched:
        join = partial(concatenate_pieces, batch_dim=batch_dim)
        return Source(drawn, total, list, join, has_samples=False)

    def read(pieces: list[Piece]) -> list[Any]:
        contents = [one for piece in pieces for one in piece.content[piece.first : piece.stop]]
        return fetch(data, contents, name="data") if is_map_style else contents

    def collated(samples: list[Any]) -> list[tuple[Collated, int]]:
        return [(collate_samples(samples, collate, option="autobatch.batches(collate=…)"), len(samples))]

    return Source(drawn, total, read, collated, has_samples=True, is_map_style=is_map_style)


def check_same_data_on(ranks: Ranks, data: Any, source: Source, sampler: Iterable[int] | None) -> None:
    """Check as far as it is cheap that all ranks read the same data; all of them call it.

    Raises:
        InputError: a sampler draws a part of the data for each rank, or the data differ in length or values.
    """
    of_loader = getattr(data, "sampler", None) or getattr(
        getattr(data, "batch_sampler", None), "sampler", None
    )
    for one in (sampler, of_loader):
        if getattr(one, "num_replicas", 1) > 1:
            raise InputError(f"{kind_of(one)} draws a part of the data for each rank: leave it out. {WHOLE}")
    ranks.check_equal({"length of the data": len(data) if isinstance(data, Sized) else None})
    if source.is_map_style:
        check_same_data(ranks.gather(digest_data(data)), [f"rank {rank}" for rank in range(ranks.world)])


def check_same_batch(ranks: Ranks, drawn: list[Piece]) -> None:
    """Check that all ranks draw the same first batch; all of them call it.

    Raises:
        InputError: whole numbers, texts, shapes or indices differ. If only other values do, which may be
            random by nature, there is a warning.
    """
    first, *others = ranks.gather(digest_of(drawn))
    for rank, found in enumerate(others, start=1):
        line = f"the first batch of rank {rank} is not that of rank 0. {WHOLE}"
        if found[0] != first[0]:
            raise InputError(line)
        if found != first:
            warnings.warn(f"{line}. If the values are random by nature, all is well", stacklevel=3)
            return


def check_ends(ranks: Ranks, *, has_more: bool) -> None:
    """Check that the data of all ranks have ended, after those of one have; all of them call it.

    Raises:
        InputError: some rank has more.
    """
    ended = [rank for rank, more in enumerate(ranks.gather(has_more)) if not more]
    if len(ended) < ranks.world:
        raise InputError(f"the data of {ranks_in_words(ended)} ended before those of other ranks. {WHOLE}")


def _yields_batches(data: Any) -> bool:
    """Tell by its attributes whether data yields batches."""
    within = loader_within(data)
    if within is not None:
        return _yields_batches(within)
    if isinstance(data, DataLoader) and data.batch_size is None and data.batch_sampler is None:
        raise InputError(
            f"this {type(data).__name__} has batch_size=None, so its items may be samples or batches: "
            "write autobatch.batches(…, batched=True) for batches, batched=False for samples"
        )
    return any(getattr(data, name, None) is not None for name in ("batch_size", "batch_sampler"))


def _cut_epochs(
    epoch: Callable[[], Iterable[Piece]], plan: Plan, epochs: int | None
) -> Iterator[list[Piece]]:
    """Cut passes over data without an index into batches of the target, or fewer where the data end."""
    batch: list[Piece] = []
    room = plan.target_batch
    for number in itertools.count() if epochs is None else range(epochs):
        samples = 0
        for content, first, stop in epoch():
            samples += stop - first
            end = first
            while end < stop:
                begin, end = end, min(stop, end + room)
                batch.append(Piece(content, begin, end))
                room -= end - begin
                if not room:
                    yield batch
                    batch, room = [], plan.target_batch
        _check_epoch(samples, plan, number)
        if plan.last_batch == "flush" and batch:
            yield batch
        if plan.last_batch != "carry":
            batch, room = [], plan.target_batch
    if batch:
        yield batch


def _check_epoch(samples: int, plan: Plan, number: int = 0) -> None:
    """Raise if an epoch has no sample, or too few for any batch."""
    if not samples and number:
        raise InputError(
            f"the data gave no sample in epoch {number + 1}: give data that can be iterated again, which an "
            "iterator cannot, or ask for fewer steps"
        )
    if not samples:
        raise InputError("the data has 0 samples: at least 1 is needed")
    if plan.last_batch == "drop" and samples < plan.target_batch:
        raise InputError(
            f"last_batch='drop' leaves no batch, because an epoch has {samples} samples and the target "
            f"batch is {plan.target_batch}: use 'carry' or 'flush' to keep them"
        )


def split(pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[list[Piece]]:
    """Split pieces into lists of these numbers of samples, whose sum is at most that of the pieces."""
    queue = iter(pieces)
    rest: Piece | None = None
    for size in sizes:
        taken, room = [], size
        while room:
            content, first, stop = piece = next(queue) if rest is None else rest
            end = min(stop, first + room)
            taken.append(piece if end == stop else Piece(content, first, end))
            room -= end - first
            rest = Piece(content, end, stop) if end < stop else None
        yield taken


def samples_of(pieces: Iterable[Piece]) -> int:
    """Count the samples of all pieces."""
    return sum(piece.stop - piece.first for piece in pieces)


def _piece_of_sample(sample: Any) -> Piece:
    return Piece([sample], 0, 1)


def as_piece(batch: Collated, *, batch_dim: int = 0) -> Piece:
    """Wrap a whole batch of a loader in a piece, with the samples in dimension 0.

    Raises:
        InputError: the parts of the batch differ in their number of samples, or a part cannot be cut.
    """
    batch = _moved(batch, batch_dim, 0)
    sizes = sorted(set(samples_along(batch)))
    if len(sizes) != 1:
        found = (
            f"sizes along dimension {batch_dim}: {', '.join(map(str, sizes))}"
            if sizes
            else "it holds no samples"
        )
        raise InputError(f"a batch of the loader cannot be cut into micro-batches ({found}): {ADVICE}")
    return Piece(batch, 0, sizes[0])


def _moved(batch: Collated, source: int, target: int) -> Collated:
    """Move the samples of tensors that have so many dimensions from one to another."""
    if source == target:
        return batch
    least = max(source, target)
    return map_tensors(
        batch, lambda one: one.movedim(source, target).contiguous() if one.dim() > least else one
    )


def concatenate_pieces(pieces: list[Piece], *, batch_dim: int = 0) -> list[tuple[Collated, int]]:
    """Concatenate pieces of a loader's batches, with the samples in their own dimension again.

    Batches that differ in form, for example padded to different lengths, are not concatenated. They follow
    one another, which changes only the number of micro-batches.
    """
    found = []
    for _, group in itertools.groupby(pieces, key=lambda piece: signature(piece.content)):
        parts = list(group)
        contents = [cut(piece.content, slice(piece.first, piece.stop)) for piece in parts]
        whole = contents[0] if len(contents) == 1 else concatenate(contents)
        found.append((_moved(whole, 0, batch_dim), samples_of(parts)))
    return found
