"""Batches as the user's collate makes them: nested containers of tensors, or objects that hold some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autobatch.workload.contract import Collated, kind_of

if TYPE_CHECKING:
    from autobatch.device.base import Meter


def to_device(batch: Collated, device: torch.device) -> Collated:
    """Move all tensors of a batch: nested tuples, lists and mappings, and anything that has ``.to``."""
    if device.type == "cpu":
        return batch
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=True), convert=lambda other: other.to(device)
    )


def map_tensors(
    batch: Collated, change: Callable[[Tensor], Tensor], *, convert: Callable[[Any], Any] | None = None
) -> Collated:
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


def tensors_of(batch: Collated) -> Iterator[Tensor]:
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


def form_of(value: object) -> str:
    """What a value is where a 0-d tensor was expected, for a message: ``a tensor of shape (3,)``."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)


def feed(
    fetched: Iterable[tuple[Collated, int]], device: torch.device, meter: Meter, *, twice: bool
) -> Iterable[tuple[Collated, int]]:
    """Bring micro-batches to the device, one at a time.

    Args:
        fetched: each micro-batch as the host makes it, with its number of samples.
        device: where they go.
        meter: told of each; what the host makes is not counted.
        twice: they can be gone through twice, as a `autobatch.workload.contract.WholeBatchLoss` needs.
    """

    def place(batch: Collated) -> Collated:
        with meter.uncounted():
            # The device's own copy, also where the device is the host.
            there = map_tensors(batch, Tensor.clone) if device.type == "cpu" else to_device(batch, device)
        meter.count(tensors_of(there))
        return there

    made = _made_aside(iter(fetched), meter)
    return Twice(made, place) if twice else _feed_once(made, device, meter)


class Twice:
    """Micro-batches that are gone through twice: fetched once, kept on the host, placed each time.

    Args:
        fetched: each micro-batch on the host, with its number of samples.
        place: makes of one what the device holds, anew each time.
    """

    def __init__(
        self, fetched: Iterable[tuple[Collated, int]], place: Callable[[Collated], Collated]
    ) -> None:
        self._fetched: Iterable[tuple[Collated, int]] | None = fetched
        self._place = place
        self._kept: list[tuple[Collated, int]] = []

    def __iter__(self) -> Iterator[tuple[Collated, int]]:
        """The first time as they are fetched, then as they were kept."""
        coming, self._fetched = self._fetched, None
        for batch, size in self._kept if coming is None else coming:
            if coming is not None:
                self._kept.append((batch, size))
            yield self._place(batch), size


def _made_aside(fetched: Iterator[tuple[Collated, int]], meter: Meter) -> Iterator[tuple[Collated, int]]:
    while True:
        with meter.uncounted():
            found = next(fetched, None)
        if found is None:
            return
        yield found


def _feed_once(
    made: Iterator[tuple[Collated, int]], device: torch.device, meter: Meter
) -> Iterator[tuple[Collated, int]]:
    for batch, size in made:
        with meter.uncounted():
            there = to_device(batch, device)
        meter.count(tensors_of(there))
        yield there, size
