"""Collated batches cut into pieces along dimension 0, and pieces concatenated again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobatch.core.errors import InputError
from autobatch.workload.contract import kind_of

PLAIN = (str, bytes, int, float, complex, type(None))
"""Types of values that belong to a sample as a whole, or to the whole batch."""
ADVICE = "give autobatch.batches the dataset itself, with collate="


def signature(value: Any) -> Any:
    """Return what must be equal for batches to be concatenated: all but the number of samples."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype, value.device
    if is_column(value):
        return type(value)
    if isinstance(value, Mapping):
        return type(value), list(value), [signature(one) for one in value.values()]
    if isinstance(value, list | tuple):
        return type(value), [signature(one) for one in value]
    return value


def is_column(value: Any) -> bool:
    """Check for a list with a plain value per sample, for example names."""
    return type(value) in (list, tuple) and bool(value) and all(isinstance(one, PLAIN) for one in value)


def samples_along(value: Any) -> Iterator[int]:
    """Yield the size along dimension 0 of each tensor and column of a collated batch.

    Raises:
        InputError: a part has no such dimension.
    """
    if is_column(value) or (isinstance(value, Tensor) and value.dim()):
        yield len(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from samples_along(one)
    elif isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        for one in value:
            yield from samples_along(one)
    elif not isinstance(value, PLAIN):
        kind = "a 0-d tensor" if isinstance(value, Tensor) else kind_of(value)
        raise InputError(f"{kind} in a batch of the loader cannot be cut into micro-batches: {ADVICE}")


def cut(value: Any, part: slice) -> Any:
    """Return some samples of a collated batch, whose tensors are views."""
    if isinstance(value, Tensor) or is_column(value):
        return value[part]
    return _rebuilt(value, [cut(one, part) for one in children_of(value)])


def concatenate(values: list[Any]) -> Any:
    """Concatenate collated batches of one signature along dimension 0."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if is_column(first):
        return type(first)(itertools.chain.from_iterable(values))
    return _rebuilt(first, [concatenate(list(same)) for same in zip(*map(children_of, values), strict=True)])


def children_of(value: Any) -> list[Any]:
    """Return the values that a container holds; empty for anything else."""
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
