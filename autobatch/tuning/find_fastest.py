"""The search for the fastest configuration of a fixed effective batch.

    ask ──► measure ──► tell ──► … ──► the best beside the default, in turn ──► run in the budget ──► answer

Largest is not fastest. The default is the first trial, and it stays unless something is faster by more than
the noise; what replaces it has run inside the enforced budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autobatch.core.knobs import Configuration, SearchAxis, Value, defaults
from autobatch.core.records import Trial, Tuning
from autobatch.tuning.compare import MINIMUM_GAIN, Choice, compare
from autobatch.tuning.configuration import ConfirmFits, Measure, Measurement

if TYPE_CHECKING:
    from autobatch.tuning.study import Finished


REMEASURED = 3
"""Best configurations that are measured again beside the default."""


PLAUSIBLE = 0.9
"""Only those whose first figure was at least this share of the default's: a single figure is off by less."""


class Budget(NamedTuple):
    """How long to tune."""

    trials: int
    """Configurations to try, those of earlier runs and of other workers on the same study included."""
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial."""


class StudyLocation(NamedTuple):
    """Which study it is, and where."""

    name: str
    storage: str | None
    """A database URL, ``grpc://host:port``, or the path of a journal file; ``None``: in memory."""
    made_for: Mapping[str, Any]
    """What its figures depend on; plain values by name."""


class TuningResult(NamedTuple):
    """The answer."""

    tuning: Tuning
    winner: Measurement | None
    """Of the best configuration; ``None`` where the default stays and was not measured."""


OnTrial = Callable[[int, Configuration, Measurement], None]


def find_fastest(
    measure: Measure,
    axes: Sequence[SearchAxis],
    *,
    budget: Budget,
    seed: int,
    place: StudyLocation,
    confirm_fits: ConfirmFits = lambda _: None,
    progress: OnTrial = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningResult:
    """Find the fastest configuration.

    Args:
        measure: runs a configuration; the search never runs the same one twice.
        axes: what may be chosen.
        budget: trials and time.
        seed: same seed, same measurements, same answer.
        place: the study.
        confirm_fits: runs a configuration inside the enforced budget, before it is chosen.
        progress: told of each trial.
        clock: seconds.

    Returns:
        The best configuration; the default, where nothing is faster by more than the noise.

    Raises:
        InputError: the storage cannot be used, or the study was made for something else.
    """
    from autobatch.tuning.study import Study

    start = clock()
    asking = 0.0
    study = Study(
        axes,
        name=place.name,
        storage=place.storage,
        made_for=place.made_for,
        seed=seed,
        trials=budget.trials,
    )
    while study.taken() < budget.trials and not budget.expired():
        before = clock()
        asked = study.ask()
        asking += clock() - before
        if asked is None:
            break
        try:
            found = measure(asked.values)
        except BaseException:
            study.abandon(asked)
            raise
        before = clock()
        study.tell(asked, found)
        asking += clock() - before
        progress(len(study.finished()), asked.values, found)
    finished = study.finished()
    base = defaults(axes)
    others = _candidates(finished, base)
    choice = compare(measure, base, others) if others else _unchallenged(finished, base)
    best, notes = _confirmed(choice, [base, *others], confirm_fits)
    notes += _why(finished, choice, base) + study.notes
    winner = choice.baseline if best == 0 else choice.contenders[best - 1]
    speeds = [0.0 if one is None else one.samples_per_s for one in (choice.baseline, winner)]
    feasible = [one for one in finished if one.found.feasible]
    tuning = Tuning(
        trials=len(finished),
        best=[base, *others][best],
        baseline_samples_per_s=speeds[0],
        best_samples_per_s=speeds[1],
        study=study.name,
        history=[_row(number, one) for number, one in enumerate(finished)],
        importance=study.importance() if len(feasible) > len(axes) else {},
        sampler=study.sampler,
        seconds=clock() - start,
        sampler_seconds=asking,
        notes=notes,
    )
    return TuningResult(tuning, winner)


def _candidates(finished: Sequence[Finished], base: Configuration) -> list[dict[str, Value]]:
    """The best that were found, as far as they may beat the default."""
    known = next((one.found for one in finished if one.values == base), None)
    floor = PLAUSIBLE * known.samples_per_s if known is not None and known.feasible else 0.0
    others = [
        one
        for one in finished
        if one.values != base and one.found.feasible and one.found.samples_per_s >= floor
    ]
    others.sort(key=lambda one: -one.found.samples_per_s)
    return [one.values for one in others[:REMEASURED]]


def _unchallenged(finished: Sequence[Finished], base: Configuration) -> Choice:
    known = next((one.found for one in finished if one.values == base and one.found.feasible), None)
    return Choice([], known, [], 0)


def _confirmed(
    choice: Choice, configurations: Sequence[Configuration], confirm_fits: ConfirmFits
) -> tuple[int, list[str]]:
    """The number of the fastest that runs inside the enforced budget, and what did not."""
    notes: list[str] = []
    for number in choice.ranking:
        reason = confirm_fits(configurations[number])
        if reason is None:
            return number, notes
        notes.append(f"a faster configuration does not fit, and is left out: {reason}")
    return 0, notes


def _why(finished: Sequence[Finished], choice: Choice, base: Configuration) -> list[str]:
    """What a person should know of the answer, beyond its figures."""
    if not any(one.found.feasible for one in finished):
        if not finished:
            return ["no trial was run: the plan stays as it is"]
        first = next((one for one in finished if one.values == base), finished[0])
        return [
            f"none of {len(finished)} configurations could be run, so the plan stays as it is; "
            f"the first: {first.found.failure}"
        ]
    if choice.baseline is None:
        failure = next((one.found.failure for one in finished if one.values == base), "it was not run")
        return [f"the default itself could not be measured ({failure}), so the plan stays as it is"]
    if not choice.ranking and choice.contenders:
        return [f"nothing was faster than the default by more than {MINIMUM_GAIN:.0%} and the noise"]
    return []


def _row(number: int, one: Finished) -> Trial:
    found = one.found
    return Trial(
        number=number,
        samples_per_s=found.samples_per_s if found.feasible else None,
        feasible=found.feasible,
        parameters=one.values,
        micro_batch=found.micro_batch or None,
        note=found.failure,
    )
