"""Samples collated as a whole batch and as its parts, with the same content.

If the collate function gives the same result twice, the parts are collated as training collates them. If it
draws at random (masks of a masked language model), the parts are cut from the whole along dimension 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.cut import PLAIN, children_of, cut, is_column, samples_along
from autobatch.workload.data import collate_samples, shallow_copies
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import seed_everything

Parts = list[tuple[Collated, int]]


@dataclass(frozen=True, slots=True)
class SplitSamples:
    """A collated batch and its parts."""

    whole: Collated
    samples: int
    collated: Parts | None
    """Parts that were collated alone; None if the collate function draws at random."""
    cut: Parts | None
    """Parts that were cut from the whole; None if it cannot be cut."""

    @property
    def parts(self) -> Parts | None:
        """The parts to compare; None if there are none with the content of the whole."""
        return self.collated or self.cut


def collate_split(workload: Workload, samples: Sequence[Any], sizes: Sequence[int]) -> SplitSamples:
    """Collate samples as a whole and as parts of the given sizes.

    Raises:
        InputError: the samples cannot be collated; the message has the shapes found.
    """

    def collate(first: int, stop: int, seed: int) -> Collated:
        seed_everything(seed)
        own = shallow_copies(samples[first:stop])
        return collate_samples(own, workload.collate, option="Workload(collate=…)")

    whole = collate(0, len(samples), 1)
    is_same = _is_same(whole, collate(0, len(samples), 2))
    bounds, first = [], 0
    for size in sizes:
        bounds.append((first, first + size))
        first += size
    parts = [(collate(first, stop, 1), stop - first) for first, stop in bounds]
    can_cut = _has_samples_first(whole, len(samples)) and _has_samples_first(*parts[0])
    can_cut = can_cut and list(_plain_values(whole)) == list(_plain_values(parts[0][0]))
    pieces = None
    if can_cut:
        pieces = [(cut(whole, slice(first, stop)), stop - first) for first, stop in bounds]
    return SplitSamples(whole, len(samples), parts if is_same else None, pieces)


def _has_samples_first(batch: Collated, samples: int) -> bool:
    """Check that dimension 0 of each part of a batch counts its samples."""
    try:
        return set(samples_along(batch)) == {samples}
    except InputError:
        return False


def _plain_values(value: Any) -> Iterator[Any]:
    """Yield the values of a collated batch that belong to all of its samples."""
    if isinstance(value, PLAIN):
        yield value
    elif not is_column(value):
        for one in children_of(value):
            yield from _plain_values(one)


def _is_same(one: Any, other: Any) -> bool:
    """Check that two collated batches have the same content."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN
    if isinstance(one, PLAIN):
        return bool(one == other) or one != one  # noqa: PLR0124 - NaN
    if isinstance(one, Mapping | list | tuple) and not isinstance(one, PackedSequence):
        mine, others = children_of(one), children_of(other)
        return len(mine) == len(others) and all(map(_is_same, mine, others))
    mine, others = list(tensors_of(one)), list(tensors_of(other))
    return len(mine) == len(others) and all(map(_is_same, mine, others))
