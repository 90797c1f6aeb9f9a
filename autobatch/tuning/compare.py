"""Which of a few configurations is fastest, beyond the noise: measured again side by side, in turn.

The best of many noisy figures is too good to be true, and a machine is faster one minute than the next. So
what is compared is the ratio to the default in the same round, and a configuration replaces the default
only where the mean of its logarithms is over nothing with a confidence of 97.5 % (Student's t, one-sided),
and over the gain that a change must bring.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autobatch.core.knobs import Configuration
from autobatch.tuning.configuration import Measure, Measurement

MINIMUM_GAIN = 0.02
"""Share that a configuration must gain over the default to replace it."""


LEAST_ROUNDS = 3


MOST_ROUNDS = 8


STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Quantiles of Student's t at 97.5 %, by degrees of freedom."""


class Choice(NamedTuple):
    """What a comparison found; figures are samples a second."""

    ranking: list[int]
    """Configurations that beat the default beyond the noise, by number, the fastest first; 0 is the
    default."""
    baseline: Measurement | None
    """The default's median; ``None`` where it did not run."""
    contenders: list[Measurement | None]
    """The same of every configuration, at the default's median times its mean ratio to it."""
    rounds: int


@dataclass
class _Contender:
    values: Configuration
    found: Measurement | None = None
    ratios: list[float] = field(default_factory=list)
    """Logarithms of its speed ÷ the default's in the same round."""
    is_out: bool = False

    def interval(self) -> tuple[float, float, float]:
        """Mean of the logarithms, and its confidence limits."""
        count = len(self.ratios)
        mean = statistics.fmean(self.ratios)
        if count < 2:
            return mean, -math.inf, math.inf
        half = STUDENT[count - 1] * statistics.stdev(self.ratios) / math.sqrt(count)
        return mean, mean - half, mean + half

    def is_better(self) -> bool:
        """Whether it beats the default beyond the noise, and by enough."""
        if self.is_out or len(self.ratios) < LEAST_ROUNDS:
            return False
        mean, low, _ = self.interval()
        return low > 0 and mean > math.log1p(MINIMUM_GAIN)

    def is_decided(self) -> bool:
        """Whether further rounds would change nothing."""
        if self.is_out or self.is_better():
            return True
        return len(self.ratios) >= LEAST_ROUNDS and self.interval()[2] < math.log1p(MINIMUM_GAIN)


def compare(measure: Measure, default: Configuration, others: Sequence[Configuration]) -> Choice:
    """Measure configurations beside the default, in turn, until it is clear which are faster.

    Args:
        measure: runs a configuration.
        default: what stays unless another is faster.
        others: the candidates.
    """
    contenders = [_Contender(values) for values in others]
    defaults: list[Measurement] = []
    rounds = 0
    while rounds < MOST_ROUNDS and not all(one.is_decided() for one in contenders):
        baseline = measure(default)
        rounds += 1
        if not baseline.feasible:
            if rounds >= LEAST_ROUNDS and not defaults:
                break
            continue
        defaults.append(baseline)
        # Each has each place in turn: none always runs in the wake of the same other.
        running = [one for one in contenders if not one.is_out and not _is_slower(one)]
        for one in running[rounds % max(1, len(running)) :] + running[: rounds % max(1, len(running))]:
            found = measure(one.values)
            one.is_out = not found.feasible
            if found.feasible:
                one.found = found
                one.ratios.append(math.log(found.samples_per_s / baseline.samples_per_s))
    better = [number for number, one in enumerate(contenders, 1) if one.is_better()]
    better.sort(key=lambda number: -statistics.fmean(contenders[number - 1].ratios))
    return _choice(better, defaults, contenders, rounds)


def _is_slower(one: _Contender) -> bool:
    return one.is_decided() and not one.is_better()


def _choice(
    better: list[int], defaults: list[Measurement], contenders: list[_Contender], rounds: int
) -> Choice:
    if not defaults:
        return Choice([], None, [None for _ in contenders], rounds)
    speed = statistics.median(one.samples_per_s for one in defaults)
    figures = [
        one.found._replace(samples_per_s=speed * math.exp(statistics.fmean(one.ratios)))
        if one.found is not None and one.ratios
        else None
        for one in contenders
    ]
    return Choice(better, defaults[-1]._replace(samples_per_s=speed), figures, rounds)
