"""Configurations of a search space, the result of measuring one, and the limits of a search.

Neither Optuna nor torch is imported here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.knobs import Configuration, SearchAxis, Value


class Measurement(NamedTuple):
    """The result of a trial."""

    samples_per_s: float
    """At the target batch; 0 if it does not run."""
    micro_batch: int = 0
    """In samples; 0 if none fits."""
    failure: str | None = None
    """Reason why it must not be chosen, in one line; None if it is feasible."""

    @property
    def feasible(self) -> bool:
        """True if the configuration may be chosen."""
        return self.failure is None


class Infeasible(Exception):  # noqa: N818 - a result of a trial
    """End of a trial whose configuration must not be chosen, with the reason."""


def infeasible(reason: str, *, micro_batch: int = 0) -> Measurement:
    """Return the result of a trial whose configuration must not be chosen."""
    return Measurement(0.0, micro_batch, reason)


class Budget(NamedTuple):
    """A limit on a search."""

    trials: int
    """Points to try, including those of earlier runs and of other processes on the same study."""
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial."""
    run_samples: int | None = None
    """Samples of the run, whose time limits the search to what it can pay back; None for no such limit."""


class StorageFailed(InputError):  # noqa: N818 - an event of the storage, as `Interrupted` is one
    """The storage of a study failed in the middle of a search, which has kept its trials so far."""


class StudyLocation(NamedTuple):
    """A study's name and storage."""

    name: str
    storage: str | None
    """A database URL, ``grpc://host:port``, or the path of a journal file; None for memory."""
    made_for: Mapping[str, Any]
    """Plain values by name that the results depend on."""


Measure = Callable[[Configuration], Measurement]
"""Runs a configuration."""
Key = tuple[tuple[str, Value], ...]
"""A configuration in hashable form."""


def key_of(values: Configuration) -> Key:
    """Return the key of a configuration."""
    return tuple(sorted(values.items()))


def changes(values: Configuration, default: Configuration) -> dict[str, Value]:
    """Return the values that differ from the default."""
    return {name: value for name, value in values.items() if value != default.get(name)}


def size_of(axes: Sequence[SearchAxis]) -> int:
    """Return the number of configurations."""
    return math.prod(len(axis.choices) for axis in axes)


def all_configurations(axes: Sequence[SearchAxis]) -> Iterator[dict[str, Value]]:
    """Yield all configurations in order."""
    names = [axis.name for axis in axes]
    for one in itertools.product(*(axis.choices for axis in axes)):
        yield dict(zip(names, one, strict=True))
