"""The space of configurations: small and finite, so that what is left of it can be listed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Container, Iterator, Mapping, Sequence

from autobatch.knobs import Axis, Configuration, Value

Key = tuple[tuple[str, Value], ...]
"""A configuration that can be looked up."""


def key_of(values: Mapping[str, Value]) -> Key:
    """The key of a configuration."""
    return tuple(sorted(values.items()))


def size_of(axes: Sequence[Axis]) -> int:
    """How many configurations there are."""
    return math.prod(len(axis.choices) for axis in axes)


def every(axes: Sequence[Axis]) -> Iterator[dict[str, Value]]:
    """All configurations, in order."""
    names = [axis.name for axis in axes]
    for one in itertools.product(*(axis.choices for axis in axes)):
        yield dict(zip(names, one, strict=True))


def nearest_unseen(
    axes: Sequence[Axis], taken: Container[Key], base: Configuration, draw: random.Random
) -> dict[str, Value] | None:
    """A configuration that was not tried and differs from ``base`` in the fewest knobs; of several, any.

    Returns:
        ``None`` where all were tried.
    """
    unseen = [values for values in every(axes) if key_of(values) not in taken]
    if not unseen:
        return None
    distances = [sum(values[name] != base.get(name) for name in values) for values in unseen]
    nearest = min(distances)
    near = [values for values, distance in zip(unseen, distances, strict=True) if distance == nearest]
    return draw.choice(near)
