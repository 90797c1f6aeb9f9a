"""Comparison of the best trials with the default, measured again side by side.

The best of many noisy measurements is too good to be true, and a machine is faster one minute than the
next. So the compared value is the ratio to the default in the same round. A configuration replaces the
default only if the mean logarithm of its ratios exceeds the minimum gain, and exceeds 0 with a confidence of
97.5 % (Student's t, one-sided, over all rounds after which the comparison may end).

Of configurations that are equally fast within the noise, the one with the fewest changes wins. So two
searches on one machine choose the same, and a change that gains nothing is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autobatch.core.knobs import Configuration, Value
from autobatch.core.records import Trial, TrialComparison
from autobatch.tuning.configuration import Measure, Measurement, changes

MINIMUM_GAIN = 0.02
"""Share that a configuration must gain over the default to replace it."""
LEAST_ROUNDS = 3
MOST_ROUNDS = 8
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Quantiles of Student's t at 97.5 %, by degrees of freedom, for a single decision."""
SEQUENTIAL = (math.inf, 45.466, 8.363, 5.175, 4.173, 3.7, 3.428, 3.253)
"""Quantiles at 99.3 %: with a decision after each of rounds 3 to 8, 2.5 % of all comparisons are wrong."""
REMEASURED = 3
"""Number of best configurations that are measured again beside the default, besides simpler ones."""
PLAUSIBLE = 0.9
"""Share of the default's speed that a candidate's must reach: a single measurement is off by less."""


@dataclass
class Contender:
    """A configuration that runs beside the default."""

    values: dict[str, Value]
    found: Measurement | None = None
    """The latest measurement; None if it did not run."""
    ratios: list[float] = field(default_factory=list)
    """Logarithms of its speed ÷ the default's in the same round."""
    is_out: bool = False
    """True if it failed."""

    def gain(self) -> float:
        """Return the mean logarithm of the ratios."""
        return statistics.fmean(self.ratios)

    def standard_error(self) -> float:
        """Return the standard error of that mean; infinite for a single ratio."""
        count = len(self.ratios)
        return statistics.stdev(self.ratios) / math.sqrt(count) if count > 1 else math.inf

    def interval(self) -> tuple[float, float]:
        """Return the confidence limits of that mean."""
        half = SEQUENTIAL[len(self.ratios) - 1] * self.standard_error()
        return self.gain() - half, self.gain() + half

    def is_better(self) -> bool:
        """Return whether it beats the default beyond the noise and by the minimum gain."""
        if self.is_out or len(self.ratios) < LEAST_ROUNDS:
            return False
        return self.interval()[0] > 0 and self.gain() > math.log1p(MINIMUM_GAIN)

    def is_slower(self) -> bool:
        """Return whether it cannot become better, so that it need not run again."""
        if self.is_out or len(self.ratios) < LEAST_ROUNDS:
            return self.is_out
        return not self.is_better() and self.interval()[1] < math.log1p(MINIMUM_GAIN)

    def record(self, default: Configuration, *, chosen: bool) -> TrialComparison:
        """Return the record of its rounds, of which there is at least one."""
        low, high = map(math.exp, self.interval())
        return TrialComparison(
            changes=changes(self.values, default),
            ratio=math.exp(self.gain()),
            low=low or None,
            high=high if math.isfinite(high) else None,
            rounds=len(self.ratios),
            chosen=chosen,
        )


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; speeds are in samples per second."""

    baseline: Measurement | None
    """The default at its median speed; None if it did not run."""
    contenders: list[Contender] = field(default_factory=list)
    ranking: list[Contender] = field(default_factory=list)
    """Those that beat the default beyond the noise; the best first."""

    def speed_of(self, one: Contender) -> Measurement:
        """Return a contender at the default's median speed times its mean ratio."""
        assert self.baseline is not None
        assert one.found is not None
        return one.found._replace(samples_per_s=self.baseline.samples_per_s * math.exp(one.gain()))


def compare(
    measure: Measure,
    default: Configuration,
    others: Sequence[Configuration],
    is_expired: Callable[[], bool] = lambda: False,
    on_round: Callable[[int, int], None] = lambda *_: None,
) -> Comparison:
    """Measure configurations and the default in turn, until it is clear which ones are faster.

    ``is_expired`` is asked once enough rounds for an answer were run, and ``on_round`` is called before each
    round with its number and the number of configurations in it.
    """
    contenders = [Contender(dict(values)) for values in others]
    defaults: list[Measurement] = []
    for rounds in range(1, MOST_ROUNDS + 1):
        is_enough = rounds > LEAST_ROUNDS and (is_expired() or not defaults)
        if is_enough or all(one.is_slower() or one.is_better() for one in contenders):
            break
        running = [one for one in contenders if not one.is_slower()]
        on_round(rounds, len(running))
        baseline = measure(default)
        if not baseline.feasible:
            continue
        defaults.append(baseline)
        # The order rotates, so that none always runs after the same other one.
        first = rounds % max(1, len(running))
        for one in running[first:] + running[:first]:
            found = measure(one.values)
            one.is_out = not found.feasible
            if found.feasible:
                one.found = found
                one.ratios.append(math.log(found.samples_per_s / baseline.samples_per_s))
    if not defaults:
        return Comparison(None, contenders)
    speed = statistics.median(one.samples_per_s for one in defaults)
    return Comparison(defaults[-1]._replace(samples_per_s=speed), contenders, _rank(contenders, default))


def candidates(
    tried: Sequence[Trial], default: Configuration, baseline: Measurement
) -> list[dict[str, Value]]:
    """Return the fastest configurations, without those too slow to beat the default.

    If the fastest has several changes, the same without one of them follow: a change that gains nothing is
    left out.
    """

    def ratio(one: Trial) -> float:
        return one.relative or (one.samples_per_s or 0.0) / baseline.samples_per_s

    others = [one for one in tried if one.parameters != default and one.feasible and ratio(one) >= PLAUSIBLE]
    chosen = [one.parameters for one in sorted(others, key=ratio, reverse=True)[:REMEASURED]]
    failed = [one.parameters for one in tried if not one.feasible]
    for name in changes(chosen[0], default) if chosen else ():
        simpler = chosen[0] | {name: default[name]}
        if simpler != default and simpler not in chosen and simpler not in failed:
            chosen.append(simpler)
    return chosen


def _rank(contenders: Sequence[Contender], default: Configuration) -> list[Contender]:
    """Return those that beat the default, the fastest first.

    Those within its standard error, or the minimum gain, count as equally fast, and the one with the fewest
    changes comes first among them.
    """
    better = [one for one in contenders if one.is_better()]
    if not better:
        return []
    best = max(better, key=Contender.gain)
    floor = best.gain() - max(best.standard_error(), math.log1p(MINIMUM_GAIN))

    def key(one: Contender) -> tuple[float, float]:
        simple = len(changes(one.values, default)) if one.gain() >= floor else math.inf
        return simple, -one.gain()

    return sorted(better, key=key)
