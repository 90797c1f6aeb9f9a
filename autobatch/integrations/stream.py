"""Batches cut from a stream of samples, or from a stream of batches of any size.

All samples of a batch are drawn before its first micro-batch runs. Only then is it known whether the batch is
short, and into which sizes it splits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, kind_of
from autobatch.workload.order import LastBatch

_PLAIN = (str, bytes, int, float, complex, type(None))
_ADVICE = "give autobatch.batches the dataset itself, with collate="


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
    sizes = sorted(set(_sizes(batch)))
    if len(sizes) != 1:
        found = f"sizes along dimension 0: {', '.join(map(str, sizes))}" if sizes else "it holds no samples"
        raise InputError(f"a batch of the loader cannot be cut into micro-batches ({found}): {_ADVICE}")
    return Piece(batch, 0, sizes[0])


def concatenate_pieces(pieces: Sequence[Piece]) -> Iterator[tuple[Collated, int]]:
    """Concatenate pieces of batches along dimension 0, and yield each result with its number of samples.

    Batches that differ in form, for example padded to different lengths, are not concatenated. They follow
    one another, which changes only the number of micro-batches.
    """
    for _, group in itertools.groupby(pieces, key=lambda piece: _signature(piece.content)):
        parts = list(group)
        cut = [_cut(piece.content, slice(piece.first, piece.stop)) for piece in parts]
        yield cut[0] if len(cut) == 1 else _concatenated(cut), samples_of(parts)


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
            f"last_batch='drop' leaves no batch, for an epoch has {samples} samples and the target batch is "
            f"{target}: use 'carry' or 'flush' to keep them"
        )


def _signature(value: Any) -> Any:
    """Return what must be equal for batches to be concatenated: all but the number of samples."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype, value.device
    if _is_column(value):
        return type(value)
    if isinstance(value, Mapping):
        return type(value), list(value), [_signature(one) for one in value.values()]
    if isinstance(value, list | tuple):
        return type(value), [_signature(one) for one in value]
    return value


def _is_column(value: Any) -> bool:
    """Check for a list with a plain value per sample, for example names."""
    return type(value) in (list, tuple) and bool(value) and all(isinstance(one, _PLAIN) for one in value)


def _sizes(value: Any) -> Iterator[int]:
    """Yield the number of samples of each part of a batch."""
    if _is_column(value) or (isinstance(value, Tensor) and value.dim()):
        yield len(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _sizes(one)
    elif isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        for one in value:
            yield from _sizes(one)
    elif not isinstance(value, _PLAIN):
        kind = "a 0-d tensor" if isinstance(value, Tensor) else kind_of(value)
        raise InputError(f"{kind} in a batch of the loader cannot be cut into micro-batches: {_ADVICE}")


def _cut(value: Any, part: slice) -> Any:
    if isinstance(value, Tensor) or _is_column(value):
        return value[part]
    return _rebuilt(value, [_cut(one, part) for one in _children(value)])


def _concatenated(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if _is_column(first):
        return type(first)(itertools.chain.from_iterable(values))
    return _rebuilt(first, [_concatenated(list(same)) for same in zip(*map(_children, values), strict=True)])


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _rebuilt(value: Any, children: list[Any]) -> Any:
    """Return the same container with other children; a plain value is returned unchanged."""
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, child in zip(value, children, strict=True):
            changed[key] = child
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children) if isinstance(value, list | tuple) else value
