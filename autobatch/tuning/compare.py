"""Comparison of two configurations, which run in turn.

A machine is faster one minute than the next, so a speed counts only as a ratio to another one in the same
round. Of n independent ratios, at most one lies below the true median with a probability of (n + 1) ÷ 2ⁿ,
whatever their distribution. So the second smallest of nine is a lower bound of the true ratio in 98.0 % of
all comparisons (the sign test; Conover 1999, Practical Nonparametric Statistics, 3.2). One hiccup in nine
rounds does not move it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from autobatch.core.knobs import Configuration

ROUNDS = 9
SPARED = 1
"""Ratios below the bound."""


class Measurement(NamedTuple):
    """Speed of a configuration that ran."""

    samples_per_s: float
    """At the target batch."""
    micro_batch: int


class Comparison(NamedTuple):
    """Speed of a configuration beside that of another one."""

    ratio: float
    """Median of the ratios of the rounds."""
    low: float | None
    """Lower bound of the true ratio; None if it was clear earlier that it is not above 1."""
    base: Measurement
    """The other configuration, at its median speed."""
    other: Measurement
    """The configuration, at its median speed."""

    @property
    def is_faster(self) -> bool:
        """True if the configuration is faster than the other one beyond the noise."""
        return self.low is not None and self.low > 1


def compare(
    measure: Callable[[Configuration], Measurement], base: Configuration, other: Configuration
) -> Comparison:
    """Measure two configurations in turn, until the other one cannot be shown to be faster any more.

    Raises:
        Infeasible: one of them fails.
    """
    bases: list[Measurement] = []
    others: list[Measurement] = []
    ratios: list[float] = []
    while len(ratios) < ROUNDS and sum(ratio <= 1 for ratio in ratios) <= SPARED:
        # Neither always runs after the other one.
        for values, speeds in [(base, bases), (other, others)][:: -1 if len(ratios) % 2 else 1]:
            speeds.append(measure(values))
        ratios.append(others[-1].samples_per_s / bases[-1].samples_per_s)
    medians = (
        run[-1]._replace(samples_per_s=statistics.median(measured.samples_per_s for measured in run))
        for run in (bases, others)
    )
    low = sorted(ratios)[SPARED] if len(ratios) == ROUNDS else None
    return Comparison(statistics.median(ratios), low, *medians)
