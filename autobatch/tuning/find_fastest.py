"""Search for the fastest configuration of a fixed target batch.

    ask ──► measure ──► tell ──► … ──► measure the best beside the default ──► confirm that it fits ──► answer

The largest micro-batch is not always the fastest. The default is the first trial. It is replaced only by a
configuration that is faster beyond the noise and has run inside the enforced budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from autobatch.core.knobs import Configuration, SearchAxis, Value, defaults
from autobatch.core.records import Trial, Tuning
from autobatch.tuning.compare import MINIMUM_GAIN, Choice, compare
from autobatch.tuning.configuration import (
    CONSTRAINTS,
    ConfirmFits,
    Measure,
    Measurement,
    StoredResult,
    StudySpec,
)

if TYPE_CHECKING:
    from autobatch.tuning.study import FinishedTrial, OptunaStudy, TrialRequest


REMEASURED = 3
"""Number of best configurations that are measured again beside the default."""
PAYBACK_SHARE = 0.5
"""Share of the run's time that tuning may take: even a doubled speed would not pay back more."""
PLAUSIBLE = 0.9
"""Share of the default's first figure that a candidate's must reach: a single figure is off by less."""


class Budget(NamedTuple):
    """A limit on the search."""

    trials: int
    """Configurations to try, including those of earlier runs and of other processes on the same study."""
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial."""
    run_samples: int | None = None
    """Samples of the run, whose time limits the search to what it can pay back; None for no such limit."""


class StudyLocation(NamedTuple):
    """A study's name and storage."""

    name: str
    storage: str | None
    """A database URL, ``grpc://host:port``, or the path of a journal file; None for memory."""
    made_for: Mapping[str, Any]
    """Plain values by name that the results depend on."""


class TuningResult(NamedTuple):
    """The answer of a search."""

    tuning: Tuning
    winner: Measurement | None
    """Of the best configuration; None if the default was kept and could not be measured."""


OnTrial = Callable[[int, Configuration, Measurement], None]
"""Called after each trial with its number from 1, the configuration, and what was measured."""


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
        measure: runs a configuration; trials never run the same one twice.
        axes: the choices of each knob.
        budget: trials and time.
        seed: the same seed and the same measurements give the same answer.
        place: the study.
        confirm_fits: runs a configuration inside the enforced budget before it is chosen.
        progress: called after each trial.
        clock: seconds.

    Returns:
        The best configuration; the default if nothing is faster beyond the noise.

    Raises:
        InputError: the storage failed, or the study was made for something else.
    """
    start, base = clock(), defaults(axes)
    study = _open_study(axes, budget, seed, place)

    def on_trial(request: TrialRequest[Measurement], found: Measurement) -> None:
        if request.known is None:
            progress(len(study.finished()), request.values, found)

    def pays_back() -> bool:
        return clock() - start <= _worth_seconds(budget, _find(study.finished(), base))

    sampler_seconds = study.optimize(
        lambda request: measure(request.values),
        trials=budget.trials,
        is_expired=lambda: budget.expired() or not pays_back(),
        on_trial=on_trial,
        clock=clock,
    )
    finished, is_stopped = study.finished(), not pays_back()
    answer = _choose(measure, finished, base, confirm_fits, is_expired=lambda: not pays_back())
    if is_stopped:
        answer = answer._replace(notes=[*answer.notes, _explain_stop(finished, base, budget)])
    tuning = _record(study, answer, finished, len(axes))
    return TuningResult(
        msgspec.structs.replace(tuning, seconds=clock() - start, sampler_seconds=sampler_seconds),
        answer.winner,
    )


def _record(
    study: OptunaStudy[Measurement],
    answer: _Answer,
    finished: Sequence[FinishedTrial[Measurement]],
    num_axes: int,
) -> Tuning:
    num_feasible = sum(one.result.feasible for one in finished)
    return Tuning(
        trials=len(finished),
        best=answer.values,
        baseline_samples_per_s=_speed(answer.baseline),
        best_samples_per_s=_speed(answer.winner),
        study=study.name,
        history=[_row(number, one) for number, one in enumerate(finished)],
        importance=study.importance() if num_feasible > num_axes else {},
        sampler=study.sampler,
        notes=answer.notes + study.notes,
    )


def _open_study(
    axes: Sequence[SearchAxis], budget: Budget, seed: int, place: StudyLocation
) -> OptunaStudy[Measurement]:
    # Only here: Optuna takes half a second to import.
    from autobatch.tuning.study import OptunaStudy

    spec = StudySpec(axes, "maximize", first_points=[defaults(axes)], encode=_encode, decode=_decode)
    return OptunaStudy(
        spec,
        name=place.name,
        storage=place.storage,
        made_for={**place.made_for, **{axis.name: list(axis.choices) for axis in axes}},
        seed=seed,
        trials=budget.trials,
    )


def _encode(found: Measurement) -> StoredResult:
    """Store a measurement; the study maximizes the logarithm of the speed."""
    constraints = dict.fromkeys(CONSTRAINTS, -1.0) | dict(found.constraints)
    # The sampler fits one more Gaussian process for each constraint: the tightest one is enough.
    tightest = max(constraints, key=lambda name: constraints[name])
    return StoredResult(
        attributes=found._replace(constraints=constraints)._asdict(),
        constraint=(tightest, constraints[tightest]),
        value=math.log(found.samples_per_s) if found.feasible else None,
    )


def _decode(_: Mapping[str, Value], attributes: Mapping[str, Any]) -> Measurement:
    stored = {name: attributes[name] for name in Measurement._fields if name in attributes}
    return Measurement(0.0, failure="no result was stored")._replace(**stored)


class _Answer(NamedTuple):
    """The chosen configuration."""

    values: dict[str, Value]
    baseline: Measurement | None
    """Of the default; None if it could not be measured."""
    winner: Measurement | None
    """Of the chosen one; None if it could not be measured."""
    notes: list[str]
    """Notes for the user, one per line."""


def _choose(
    measure: Measure,
    finished: Sequence[FinishedTrial[Measurement]],
    base: dict[str, Value],
    confirm_fits: ConfirmFits,
    *,
    is_expired: Callable[[], bool],
) -> _Answer:
    """Compare the best trials with the default, and return the fastest that fits."""
    known = _find(finished, base)
    baseline = known if known is not None and known.feasible else None
    others = _candidates(finished, base, baseline)
    choice = (
        compare(measure, base, others, is_expired)
        if others and not is_expired()
        else Choice([], baseline, [], 0)
    )
    notes = []
    best = 0
    for number in choice.ranking:
        reason = confirm_fits(others[number - 1])
        if reason is None:
            best = number
            break
        notes.append(f"left out a faster configuration, because it does not fit: {reason}")
    notes += _explain(finished, choice, known)
    if best == 0:
        return _Answer(base, choice.baseline, choice.baseline, notes)
    return _Answer(others[best - 1], choice.baseline, choice.contenders[best - 1], notes)


def _candidates(
    finished: Sequence[FinishedTrial[Measurement]], base: Configuration, baseline: Measurement | None
) -> list[dict[str, Value]]:
    """Return the fastest configurations, without those too slow to beat the default."""
    floor = PLAUSIBLE * _speed(baseline)
    others = [
        one
        for one in finished
        if one.values != base and one.result.feasible and one.result.samples_per_s >= floor
    ]
    others.sort(key=lambda one: -one.result.samples_per_s)
    return [one.values for one in others[:REMEASURED]]


def _explain(
    finished: Sequence[FinishedTrial[Measurement]], choice: Choice, known: Measurement | None
) -> list[str]:
    """Return notes for the user on why the default was kept, one per line.

    Args:
        finished: the trials.
        choice: the comparison.
        known: what the default's own trial found; None if it did not run.
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
        return [f"kept the default configuration: none was faster by {100 * MINIMUM_GAIN:g} % and the noise"]
    return []


def _worth_seconds(budget: Budget, default: Measurement | None) -> float:
    """Return the seconds that the search may take, by the speed of the default configuration."""
    if budget.run_samples is None or default is None or not default.feasible:
        return math.inf
    return PAYBACK_SHARE * budget.run_samples / default.samples_per_s


def _explain_stop(
    finished: Sequence[FinishedTrial[Measurement]], base: dict[str, Value], budget: Budget
) -> str:
    seconds = _worth_seconds(budget, _find(finished, base)) / PAYBACK_SHARE
    return (
        f"stopped tuning after {len(finished)} of {budget.trials} trials: the run takes about {seconds:.3g} "
        f"s, and more tuning cannot pay back. --trials {budget.trials} runs all of them"
    )


def _find(finished: Sequence[FinishedTrial[Measurement]], values: Configuration) -> Measurement | None:
    return next((one.result for one in finished if one.values == values), None)


def _speed(found: Measurement | None) -> float:
    return 0.0 if found is None else found.samples_per_s


def _row(number: int, one: FinishedTrial[Measurement]) -> Trial:
    found = one.result
    return Trial(
        number=number,
        samples_per_s=found.samples_per_s if found.feasible else None,
        feasible=found.feasible,
        parameters=one.values,
        micro_batch=found.micro_batch or None,
        note=found.failure,
    )
