"""Search spaces, measurements, and what a study must know of them.

This module knows neither Optuna nor torch.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from autobatch.core.knobs import Configuration, SearchAxis, Value

MEMORY = "mem_over"
"""Constraint: the share by which a configuration exceeds the budget."""
LOSS = "loss_gap"
"""Constraint: the distance of its losses from the reference, minus the tolerance."""
RUNS = "does_not_run"
"""Constraint: the configuration raised an error, crashed or hung."""
CONSTRAINTS = (MEMORY, LOSS, RUNS)


class Measurement(NamedTuple):
    """The result of a trial."""

    samples_per_s: float
    """At the target batch; 0 if it does not run."""
    micro_batch: int = 0
    """In samples; 0 if none fits."""
    failure: str | None = None
    """Reason why it is infeasible, in one line; None if it is feasible."""
    constraints: Mapping[str, float] = {}
    """Figures by name that must not exceed 0; a missing one is met."""
    default_samples_per_s: float = 0.0
    """Speed of the default around the same time; 0 if unknown."""
    started: str = ""
    """Start of the search that ran it, as an ISO date and time; empty if unknown."""

    @property
    def relative(self) -> float | None:
        """Speed ÷ that of the default around the same time; None if unknown."""
        return self.samples_per_s / self.default_samples_per_s if self.default_samples_per_s else None

    @property
    def feasible(self) -> bool:
        """True if the configuration may be chosen."""
        return self.failure is None


def infeasible(constraint: str, reason: str, *, over: float = 1.0, micro_batch: int = 0) -> Measurement:
    """Return the result of a trial whose configuration must not be chosen."""
    return Measurement(0.0, micro_batch, reason, {constraint: over})


Measure = Callable[[Configuration], Measurement]
"""Runs a configuration."""
ConfirmFits = Callable[[Configuration], str | None]
"""Runs a configuration inside the enforced budget. Returns why it does not fit, or None if it fits."""
Key = tuple[tuple[str, Value], ...]
"""A configuration in hashable form."""


def key_of(values: Mapping[str, Value]) -> Key:
    """Return the key of a configuration."""
    return tuple(sorted(values.items()))


def size_of(axes: Sequence[SearchAxis]) -> int:
    """Return the number of configurations."""
    return math.prod(len(axis.choices) for axis in axes)


def all_configurations(axes: Sequence[SearchAxis]) -> Iterator[dict[str, Value]]:
    """Yield all configurations in order."""
    names = [axis.name for axis in axes]
    for one in itertools.product(*(axis.choices for axis in axes)):
        yield dict(zip(names, one, strict=True))


def nearest_unseen(
    axes: Sequence[SearchAxis], taken: Container[Key], base: Configuration, draw: random.Random
) -> dict[str, Value] | None:
    """Return an untried configuration that differs from ``base`` in the fewest knobs; draw one of several.

    Returns:
        None if all were tried.
    """
    unseen = [values for values in all_configurations(axes) if key_of(values) not in taken]
    if not unseen:
        return None
    distances = [sum(values[name] != base.get(name) for name in values) for values in unseen]
    nearest = min(distances)
    near = [values for values, distance in zip(unseen, distances, strict=True) if distance == nearest]
    return draw.choice(near)


class LogRange(NamedTuple):
    """A float between two bounds, on a logarithmic scale."""

    name: str
    low: float
    high: float


class MedianStop(NamedTuple):
    """A rule that ends a trial that is worse than the median of the earlier ones."""

    startup_trials: int
    """Trials that run to their end before any is ended."""
    warmup_steps: int
    """First step at which a trial may be ended."""


class StoredResult(NamedTuple):
    """A result in the form in which a study stores it."""

    attributes: Mapping[str, Any]
    """Plain values by name."""
    constraint: tuple[str, float]
    """A name, and a figure that exceeds 0 if the result is infeasible."""
    value: float | None
    """The optimized figure; None if there is none."""
    fallback: float = 0.0
    """Value of an infeasible result if no other trial has one."""


ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class StudySpec(Generic[ResultT]):
    """The search space of a study, and the form of its stored results."""

    space: Sequence[SearchAxis] | LogRange
    direction: Literal["maximize", "minimize"]
    first_points: Sequence[Configuration]
    """Points to try before the sampler chooses."""
    encode: Callable[[ResultT], StoredResult]
    decode: Callable[[Mapping[str, Value], Mapping[str, Any]], ResultT]
    """Restores a result from the values and the stored attributes of a trial."""
    metric: str
    """Name of the optimized figure, which dashboards show."""
    early_stop: MedianStop | None = None
    """None to run every trial to its end."""

    @property
    def axes(self) -> Sequence[SearchAxis]:
        """Axes of a finite space; empty for a range."""
        return () if isinstance(self.space, LogRange) else self.space

    @property
    def names(self) -> set[str]:
        """Names of the values of a point."""
        return {self.space.name} if isinstance(self.space, LogRange) else {axis.name for axis in self.space}

    @property
    def size(self) -> float:
        """Number of points; infinite for a range."""
        return math.inf if isinstance(self.space, LogRange) else size_of(self.space)
