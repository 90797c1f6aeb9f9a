"""Comparison of a few configurations with the default, measured again side by side.

The best of many noisy figures is too good to be true, and a machine is faster one minute than the next. So
the compared figure is the ratio to the default in the same round. A configuration replaces the default only
if the mean logarithm of its ratios exceeds the minimum gain, and exceeds 0 with a confidence of 97.5 %
(Student's t, one-sided, over all rounds after which the comparison may end).

Of configurations that are equally fast within the noise, the one with the fewest changes wins. So two
searches on one machine choose the same, and a change that gains nothing is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autobatch.core.knobs import Configuration, Value
from autobatch.tuning.configuration import Measure, Measurement

MINIMUM_GAIN = 0.02
"""Share that a configuration must gain over the default to replace it."""
LEAST_ROUNDS = 3
MOST_ROUNDS = 8
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Quantiles of Student's t at 97.5 %, by degrees of freedom, for a single decision."""
SEQUENTIAL = (math.inf, 45.466, 8.363, 5.175, 4.173, 3.7, 3.428, 3.253)
"""Quantiles at 99.3 %: with a decision after each of rounds 3 to 8, 2.5 % of all comparisons are wrong."""


OnRound = Callable[[int, int, int], None]
"""Called before each round with its number, the most rounds, and the number of configurations in it."""


class SpeedRatio(NamedTuple):
    """Speed of a configuration ÷ that of the default, measured side by side."""

    mean: float
    """Geometric mean over the rounds."""
    low: float
    """Bound below which the true ratio lies with a probability of 2.5 %; 0 if unknown."""
    high: float
    """Bound above which it lies with a probability of 2.5 %; infinite if unknown."""
    rounds: int


class Choice(NamedTuple):
    """The result of a comparison; speeds are in samples per second."""

    ranking: list[int]
    """Numbers, from 1, of the configurations that beat the default beyond the noise; the best first."""
    baseline: Measurement | None
    """The default at its median speed; None if it did not run."""
    contenders: list[Measurement | None]
    """The configurations, each at the default's median speed times its mean ratio; None if it did not run."""
    rounds: int
    ratios: list[SpeedRatio | None] = []
    """Of the configurations to the default; None if it did not run."""


@dataclass
class _Contender:
    values: Configuration
    found: Measurement | None = None
    ratios: list[float] = field(default_factory=list)
    """Logarithms of its speed ÷ the default's in the same round."""
    is_out: bool = False

    def interval(self) -> tuple[float, float, float]:
        """Return the mean of the logarithms and its confidence limits."""
        count = len(self.ratios)
        mean = statistics.fmean(self.ratios)
        if count < 2:
            return mean, -math.inf, math.inf
        half = SEQUENTIAL[count - 1] * self.standard_error()
        return mean, mean - half, mean + half

    def standard_error(self) -> float:
        """Return the standard error of the mean of the logarithms."""
        return statistics.stdev(self.ratios) / math.sqrt(len(self.ratios))

    def ratio(self) -> SpeedRatio | None:
        """Return its ratio to the default."""
        if not self.ratios:
            return None
        mean, low, high = map(math.exp, self.interval())
        return SpeedRatio(mean, low, high, len(self.ratios))

    def is_better(self) -> bool:
        """Return whether it beats the default beyond the noise and by the minimum gain."""
        if self.is_out or len(self.ratios) < LEAST_ROUNDS:
            return False
        mean, low, _ = self.interval()
        return low > 0 and mean > math.log1p(MINIMUM_GAIN)

    def is_slower(self) -> bool:
        """Return whether it cannot become better, so that it need not run again."""
        if self.is_out:
            return True
        is_measured = len(self.ratios) >= LEAST_ROUNDS and not self.is_better()
        return is_measured and self.interval()[2] < math.log1p(MINIMUM_GAIN)


def compare(
    measure: Measure,
    default: Configuration,
    others: Sequence[Configuration],
    is_expired: Callable[[], bool] = lambda: False,
    on_round: OnRound = lambda *_: None,
) -> Choice:
    """Measure configurations and the default in turn, until it is clear which ones are faster.

    Args:
        measure: runs a configuration.
        default: kept unless another is faster.
        others: the candidates.
        is_expired: asked once enough rounds for an answer were run.
        on_round: called before every round.
    """
    contenders = [_Contender(values) for values in others]
    defaults: list[Measurement] = []
    rounds = 0
    while rounds < MOST_ROUNDS and not (rounds >= LEAST_ROUNDS and is_expired()):
        if all(one.is_slower() or one.is_better() for one in contenders):
            break
        rounds += 1
        running = [one for one in contenders if not one.is_slower()]
        on_round(rounds, MOST_ROUNDS, len(running))
        baseline = measure(default)
        if not baseline.feasible:
            if rounds >= LEAST_ROUNDS and not defaults:
                break
            continue
        defaults.append(baseline)
        # The order rotates, so that none always runs after the same other one.
        for one in running[rounds % max(1, len(running)) :] + running[: rounds % max(1, len(running))]:
            found = measure(one.values)
            one.is_out = not found.feasible
            if found.feasible:
                one.found = found
                one.ratios.append(math.log(found.samples_per_s / baseline.samples_per_s))
    return _choice(_rank(contenders, default), defaults, contenders, rounds)


def changes(values: Configuration, default: Configuration) -> dict[str, Value]:
    """Return the values that differ from the default."""
    return {name: value for name, value in values.items() if value != default.get(name)}


def _rank(contenders: Sequence[_Contender], default: Configuration) -> list[int]:
    """Return the numbers of those that beat the default, from 1.

    The fastest come first. Those within its standard error, or the minimum gain, count as equally fast, and
    the one with the fewest changes comes first among them.
    """
    better = {number: one for number, one in enumerate(contenders, 1) if one.is_better()}
    if not better:
        return []
    means = {number: statistics.fmean(one.ratios) for number, one in better.items()}
    best = max(means, key=lambda number: means[number])
    floor = means[best] - max(better[best].standard_error(), math.log1p(MINIMUM_GAIN))

    def key(number: int) -> tuple[float, ...]:
        if means[number] < floor:
            return (math.inf, -means[number])
        return (len(changes(better[number].values, default)), -means[number])

    return sorted(better, key=key)


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
    baseline = defaults[-1]._replace(samples_per_s=speed)
    return Choice(better, baseline, figures, rounds, [one.ratio() for one in contenders])
