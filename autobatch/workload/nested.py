"""Collated batches: nested containers of tensors, or objects that hold tensors.

They are looked through, moved to the device, cut along dimension 0, and concatenated again.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, kind_of

PLAIN = (str, bytes, int, float, complex, type(None))
"""Types of values that belong to a sample as a whole, or to the whole batch."""


def to_device(batch: Collated, device: torch.device) -> Collated:
    """Move all tensors to a device: nested tuples, lists and mappings, and objects with a ``to`` method.

    A GPU copies from pinned memory while the host continues. From ordinary memory, the host may wait for the
    GPU (CUDA Runtime API, "API synchronization behavior"). So everything that can be pinned is.
    """
    if device.type == "cpu":
        return batch
    if not callable(getattr(batch, "to", None)):
        return _rebuilt(batch, [to_device(child, device) for child in children_of(batch)])
    if device.type == "cuda":
        pins_itself = not isinstance(batch, Tensor) and callable(getattr(batch, "pin_memory", None))
        # As transformers' BatchEncoding, which cannot pin itself.
        batch = batch.pin_memory() if pins_itself else map_tensors(batch, _pinned)
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:
        return batch.to(device)


def _pinned(tensor: Tensor) -> Tensor:
    """Copy a tensor of the host to pinned memory, if the host grants it.

    torch uses a pinned block again once the copy from it is done (aten/src/ATen/core/CachingHostAllocator.h).
    A tensor with gaps, such as ``ids[:, :-1]``, it would first copy to ordinary memory, even if it is pinned
    (``copy_requires_temporaries`` in aten/src/ATen/native/cuda/Copy.cu).
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if is_dense and tensor.is_pinned():
        return tensor
    try:
        return (tensor if is_dense else tensor.contiguous()).pin_memory()
    except RuntimeError:
        return tensor


def map_tensors(batch: Collated, change: Callable[[Tensor], Tensor]) -> Collated:
    """Return the same containers and objects with every tensor changed; keep all other values."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping | list | tuple):
        return _rebuilt(batch, [map_tensors(child, change) for child in children_of(batch)])
    if isinstance(batch, nn.Module) or not any(True for _ in tensors_of(batch)):
        return batch
    changed = copy.copy(batch)
    # Past a ``__setattr__`` of its own, which may put attributes elsewhere, as that of a graph does.
    for name, value in list(vars(changed).items()):
        if isinstance(value, Tensor | Mapping | list | tuple):
            vars(changed)[name] = map_tensors(value, change)
    return changed


def map_leaves(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """Return nested containers with each leaf changed.

    Args:
        value: dicts, lists and tuples of leaves. Objects of other classes are leaves.
        change: receives the place of a leaf, which are the keys joined by slashes, and the leaf.
        place: of the value.
    """

    def inner(key: object, item: Any) -> Any:
        return map_leaves(item, change, f"{place}/{key}" if place else str(key))

    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: inner(key, item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(inner(number, item) for number, item in enumerate(value))
    return change(place, value)


def tensors_of(batch: Collated) -> Iterator[Tensor]:
    """Yield all tensors of nested containers, or of an object that has them as attributes."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in children_of(batch):
            yield from tensors_of(value)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        for value in vars(batch).values():
            if isinstance(value, Tensor | Mapping | list | tuple):
                yield from tensors_of(value)


def children_of(value: Any) -> list[Any]:
    """Return the values that a container holds; empty for anything else."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _rebuilt(value: Any, children: list[Any]) -> Any:
    """Return the same container with other children; a plain value is returned unchanged."""
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        changed.update(zip(value, children, strict=True))
        return changed
    if isinstance(value, Mapping):
        return dict(zip(value, children, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children) if isinstance(value, list | tuple) else value


def cut(value: Any, part: slice, samples: int) -> Any:
    """Return a part of a collated batch of so many samples, whose tensors are views.

    Raises:
        InputError: a tensor or column of the batch has no such samples along dimension 0.
    """
    is_column = type(value) in (list, tuple) and bool(value) and all(isinstance(row, PLAIN) for row in value)
    if is_column or (isinstance(value, Tensor) and value.dim()):
        if len(value) == samples:
            return value[part]
    elif isinstance(value, Mapping | list | tuple) and not isinstance(value, PackedSequence):
        return _rebuilt(value, [cut(child, part, samples) for child in children_of(value)])
    elif isinstance(value, PLAIN):
        return value
    raise InputError(f"{kind_of(value)} cannot be cut into {samples} samples")


def held(placed: Iterable[tuple[Collated, int]]) -> Iterator[tuple[Collated, int]]:
    """Hold each micro-batch of a step until the next one is there, and the last as long as the iterator.

    Loops by hand and of other libraries do so, because a variable of theirs has the micro-batch.
    """
    last: list[Any] = []

    def hold(micro_batch: tuple[Collated, int]) -> tuple[Collated, int]:
        last[:] = [micro_batch]
        return micro_batch

    return map(hold, placed)
