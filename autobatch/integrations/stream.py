"""Batches cut from a stream of samples, or from a stream of batches of any size.

All samples of a batch are drawn before its first micro-batch runs. Only then is it known whether the batch is
short, and into which sizes it splits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated
from autobatch.workload.cut import ADVICE, concatenate, cut, samples_along, signature
from autobatch.workload.order import LastBatch


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
