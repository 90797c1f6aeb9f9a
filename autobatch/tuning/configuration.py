"""What a trial found, and the ports between who asks for trials and who runs them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from autobatch.core.knobs import Configuration, SearchAxis, Value

MEMORY = "mem_over"
"""Constraint: share by which a configuration is over the budget."""


LOSS = "loss_gap"
"""Constraint: how far its losses are from the reference's, less what is tolerated."""


RUNS = "does_not_run"
"""Constraint: it raised an error, crashed or hung."""


CONSTRAINTS = (MEMORY, LOSS, RUNS)


class Measurement(NamedTuple):
    """What a trial found."""

    samples_per_s: float
    """At the effective batch; 0 where it does not run."""
    micro_batch: int = 0
    """That it ran at, in samples; 0 where there is none."""
    failure: str | None = None
    """Why it is not feasible, in one line."""
    constraints: Mapping[str, float] = {}
    """Figures that must not be over 0, by name; what is not given counts as met."""

    @property
    def feasible(self) -> bool:
        """Whether it may be chosen."""
        return self.failure is None


def infeasible(constraint: str, reason: str, *, over: float = 1.0, micro_batch: int = 0) -> Measurement:
    """A trial whose configuration cannot be chosen."""
    return Measurement(0.0, micro_batch, reason, {constraint: over})


Measure = Callable[[Configuration], Measurement]
"""Runs a configuration."""


ConfirmFits = Callable[[Configuration], str | None]
"""Runs a configuration inside the enforced budget; why it does not fit, or ``None``."""


Key = tuple[tuple[str, Value], ...]
"""A configuration that can be looked up."""


def key_of(values: Mapping[str, Value]) -> Key:
    """The key of a configuration."""
    return tuple(sorted(values.items()))


def size_of(axes: Sequence[SearchAxis]) -> int:
    """How many configurations there are."""
    return math.prod(len(axis.choices) for axis in axes)


def every(axes: Sequence[SearchAxis]) -> Iterator[dict[str, Value]]:
    """All configurations, in order."""
    names = [axis.name for axis in axes]
    for one in itertools.product(*(axis.choices for axis in axes)):
        yield dict(zip(names, one, strict=True))


def nearest_unseen(
    axes: Sequence[SearchAxis], taken: Container[Key], base: Configuration, draw: random.Random
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
