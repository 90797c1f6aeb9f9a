"""Batches as the user's collate makes them: nested containers of tensors, or objects that hold some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from autobatch.workload import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors of a batch: nested tuples, lists and mappings, and anything that has ``.to``."""
    if device.type == "cpu":
        return batch
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=True), convert=lambda other: other.to(device)
    )


def map_tensors(
    batch: Batch, change: Callable[[Tensor], Tensor], *, convert: Callable[[Any], Any] | None = None
) -> Batch:
    """The same batch with every tensor changed; what is no container of tensors is kept as it is.

    Args:
        batch: what the user's collate made.
        change: called with each tensor.
        convert: called instead with what has a method ``to`` of its own: a packed sequence, a graph.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if convert is not None and callable(getattr(batch, "to", None)):
        return convert(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = map_tensors(value, change, convert=convert)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change, convert=convert) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, change, convert=convert) for value in batch)
    return batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a nested batch, or of an object that keeps them as attributes."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        for value in vars(batch).values():
            if isinstance(value, Tensor | Mapping | list | tuple):
                yield from tensors_of(value)
