"""Windows out of a stream: samples one by one, or batches of any size that are cut and joined anew.

A window's samples are drawn before its first micro-batch runs: only then is it known whether the window is
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
from autobatch.workload.contract import Collated
from autobatch.workload.order import LastBatch

_PLAIN = (str, bytes, int, float, complex, type(None))


_ADVICE = "hand over the data set itself, with its collate"


class Piece(NamedTuple):
    """Samples ``first`` to ``stop`` of what a stream gave; a sample by itself is a piece of one."""

    content: Any
    first: int
    stop: int


def cut_epoch(
    epoch: Callable[[], Iterable[Piece]], target: int, *, epochs: int | None, last_batch: LastBatch
) -> Iterator[list[Piece]]:
    """Cut a stream into windows.

    Args:
        epoch: starts a pass over the data.
        target: samples a window.
        epochs: passes; ``None``: without end.
        last_batch: what becomes of samples that an epoch leaves over.

    Yields:
        The pieces of each window, ``target`` samples together; fewer where the data of a window end.

    Raises:
        InputError: a pass gives no sample, or too few for any window.
    """
    window: list[Piece] = []
    room = target
    for number in itertools.count() if epochs is None else range(epochs):
        samples = 0
        for piece in epoch():
            content, first, stop = piece
            samples += stop - first
            while first < stop:
                end = min(stop, first + room)
                window.append(Piece(content, first, end))
                room -= end - first
                first = end
                if not room:
                    yield window
                    window, room = [], target
        _check_epoch(number, samples, target, last_batch)
        if last_batch == "flush" and window:
            yield window
        if last_batch != "carry":
            window, room = [], target
    if window:
        yield window


def split(pieces: Iterable[Piece], sizes: Iterable[int]) -> Iterator[list[Piece]]:
    """Split a window's pieces into micro-batches of these sizes, which sum up to the window's samples."""
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
    """How many samples pieces have together."""
    return sum(piece.stop - piece.first for piece in pieces)


def as_piece(batch: Collated) -> Piece:
    """A whole batch as a piece.

    Raises:
        InputError: its parts do not agree on the number of samples, or it cannot be cut.
    """
    sizes = sorted(set(_sizes(batch)))
    if len(sizes) != 1:
        found = f"sizes along dimension 0: {', '.join(map(str, sizes))}" if sizes else "it holds no samples"
        raise InputError(f"a batch of the loader cannot be cut into micro-batches ({found}): {_ADVICE}")
    return Piece(batch, 0, sizes[0])


def rejoin(pieces: Sequence[Piece]) -> Iterator[tuple[Collated, int]]:
    """Join pieces of batches along dimension 0, with their samples.

    Batches that are not built alike, padded to different lengths say, are not joined: they follow one
    another, which changes nothing but the number of micro-batches.
    """
    for _, group in itertools.groupby(pieces, key=lambda piece: _signature(piece.content)):
        parts = list(group)
        cut = [_cut(piece.content, slice(piece.first, piece.stop)) for piece in parts]
        yield cut[0] if len(cut) == 1 else _joined(cut), samples_of(parts)


def _check_epoch(number: int, samples: int, target: int, last_batch: LastBatch) -> None:
    if not samples and number:
        raise InputError(
            f"the data gave no sample in epoch {number + 1}: an iterator runs once, so hand over something "
            "that can be iterated anew, or ask for fewer windows"
        )
    if not samples:
        raise InputError("the data gave no sample at all")
    if last_batch == "drop" and samples < target:
        raise InputError(
            f"last_batch='drop' leaves no window: {samples} samples an epoch, a target batch of {target}; "
            "'carry' or 'flush' keeps them"
        )


def _signature(value: Any) -> Any:
    """What must be equal for batches to be joined: all but the number of samples."""
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
    """Whether this is a list with a plain value for each sample: names, say."""
    return type(value) in (list, tuple) and bool(value) and all(isinstance(one, _PLAIN) for one in value)


def _sizes(value: Any) -> Iterator[int]:
    """How many samples each part of a batch has."""
    if _is_column(value) or (isinstance(value, Tensor) and value.dim()):
        yield len(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _sizes(one)
    elif isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        for one in value:
            yield from _sizes(one)
    elif not isinstance(value, _PLAIN):
        kind = "0-d tensor" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"a {kind} in a batch of the loader cannot be cut into micro-batches: {_ADVICE}")


def _cut(value: Any, part: slice) -> Any:
    if isinstance(value, Tensor) or _is_column(value):
        return value[part]
    return _rebuilt(value, [_cut(one, part) for one in _children(value)])


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if _is_column(first):
        return type(first)(itertools.chain.from_iterable(values))
    return _rebuilt(first, [_joined(list(same)) for same in zip(*map(_children, values), strict=True)])


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _rebuilt(value: Any, children: list[Any]) -> Any:
    """The same container with other children; a plain value stays what it is."""
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, child in zip(value, children, strict=True):
            changed[key] = child
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children) if isinstance(value, list | tuple) else value
