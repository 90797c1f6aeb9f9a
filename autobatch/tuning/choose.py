"""The choice among finished trials: the best run again beside the default, and the best that fits wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autobatch.core.knobs import Configuration, Value
from autobatch.core.progress import Progress
from autobatch.core.records.tuning import TrialComparison
from autobatch.tuning.compare import MINIMUM_GAIN, Choice, changes, compare
from autobatch.tuning.configuration import ConfirmFits, Measure, Measurement

if TYPE_CHECKING:
    from autobatch.tuning.study import FinishedTrial

REMEASURED = 3
"""Number of best configurations that are measured again beside the default, besides simpler ones."""
PLAUSIBLE = 0.9
"""Share of the default's speed that a candidate's must reach: a single figure is off by less."""


class Answer(NamedTuple):
    """The chosen configuration."""

    values: dict[str, Value]
    baseline: Measurement | None
    """Of the default; None if it could not be measured."""
    winner: Measurement | None
    """Of the chosen one; None if it could not be measured."""
    notes: list[str]
    """Notes for the user, one per line."""
    comparisons: list[TrialComparison]


def choose(
    measure: Measure,
    finished: Sequence[FinishedTrial[Measurement]],
    base: dict[str, Value],
    confirm_fits: ConfirmFits,
    progress: Progress,
    *,
    known: Measurement | None,
    is_expired: Callable[[], bool],
    most: int | None = None,
) -> Answer:
    """Compare the best trials with the default, and return the best that fits.

    Args:
        measure: runs a configuration.
        finished: the trials.
        base: the default.
        confirm_fits: runs a configuration inside the enforced budget before it is chosen.
        progress: receives every round.
        known: what was last measured of the default; None if it did not run.
        is_expired: whether there is no time to compare.
        most: number of configurations that there is time to compare; None for any number.
    """
    baseline = known if known is not None and known.feasible else None
    others = _candidates(finished, base, baseline)[:most]
    choice = Choice([], baseline, [], 0)
    if others and not is_expired():

        def on_round(number: int, most: int, running: int) -> None:
            progress.doing(f"comparing the best {running} with the default, round {number} of at most {most}")

        choice = compare(measure, base, others, is_expired, on_round)
    notes = []
    best = 0
    for number in choice.ranking:
        progress.doing("checking that the choice fits in memory")
        reason = confirm_fits(others[number - 1])
        if reason is None:
            best = number
            break
        notes.append(f"left out a faster configuration, because it does not fit: {reason}")
    notes += _explain(finished, choice, known)
    comparisons = _comparisons(choice, [changes(values, base) for values in others], best)
    if best == 0:
        return Answer(base, choice.baseline, choice.baseline, notes, comparisons)
    return Answer(others[best - 1], choice.baseline, choice.contenders[best - 1], notes, comparisons)


def _comparisons(choice: Choice, changed: Sequence[dict[str, Value]], best: int) -> list[TrialComparison]:
    """Return the records of a comparison, the fastest first.

    Args:
        choice: the comparison.
        changed: the changes of each configuration.
        best: number of the chosen one, from 1; 0 for the default.
    """
    found = [
        TrialComparison(
            changes=values,
            ratio=ratio.mean,
            low=ratio.low or None,
            high=ratio.high if math.isfinite(ratio.high) else None,
            rounds=ratio.rounds,
            chosen=number == best,
        )
        for number, (values, ratio) in enumerate(zip(changed, choice.ratios, strict=False), 1)
        if ratio is not None
    ]
    return sorted(found, key=lambda one: -one.ratio)


def _candidates(
    finished: Sequence[FinishedTrial[Measurement]], base: Configuration, baseline: Measurement | None
) -> list[dict[str, Value]]:
    """Return the fastest configurations, without those too slow to beat the default.

    If the fastest has several changes, the same without one of them follow: a change that gains nothing is
    left out.
    """
    if baseline is None:
        return []
    others = [
        one
        for one in finished
        if one.values != base and one.result.feasible and _ratio(one.result, baseline) >= PLAUSIBLE
    ]
    others.sort(key=lambda one: -_ratio(one.result, baseline))
    chosen = [one.values for one in others[:REMEASURED]]
    failed = [one.values for one in finished if not one.result.feasible]
    for name in changes(chosen[0], base) if chosen else ():
        simpler = chosen[0] | {name: base[name]}
        if simpler != base and simpler not in chosen and simpler not in failed:
            chosen.append(simpler)
    return chosen


def _ratio(found: Measurement, baseline: Measurement) -> float:
    return found.relative or found.samples_per_s / baseline.samples_per_s


def _explain(
    finished: Sequence[FinishedTrial[Measurement]], choice: Choice, known: Measurement | None
) -> list[str]:
    """Return notes for the user on why the default was kept, one per line.

    Args:
        finished: the trials.
        choice: the comparison.
        known: what was last measured of the default; None if it did not run.
    """
    if not finished:
        return ["kept the plan: no trial was run"]
    if not any(one.result.feasible for one in finished):
        first = known or finished[0].result
        return [f"kept the plan: none of {len(finished)} configurations ran. The first one: {first.failure}"]
    if choice.baseline is None:
        failure = "it was not run" if known is None else known.failure
        return [f"kept the plan: the default configuration could not be measured ({failure})"]
    if not choice.ranking and choice.contenders:
        return [f"kept the default: no other was faster by {100 * MINIMUM_GAIN:g} % beyond the noise"]
    return []


def find_result(finished: Sequence[FinishedTrial[Measurement]], values: Configuration) -> Measurement | None:
    """Return the result of a configuration; None if it was not tried."""
    return next((one.result for one in finished if one.values == values), None)


def speed_of(found: Measurement | None) -> float:
    """Return the speed in samples per second; 0 if nothing was measured."""
    return 0.0 if found is None else found.samples_per_s
