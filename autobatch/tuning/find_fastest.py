"""Search for the fastest configuration of a fixed target batch.

    ask ──► measure ──► tell ──► … ──► measure the best beside the default ──► confirm that it fits ──► answer

The largest micro-batch is not always the fastest. The default is the first trial. It is replaced only by a
configuration that is faster beyond the noise and has run inside the enforced budget.
"""

from __future__ import annotations

import datetime
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from autobatch.core.knobs import Configuration, SearchAxis, Value, defaults
from autobatch.core.progress import SILENT, Progress
from autobatch.core.records.tuning import Trial, Tuning
from autobatch.tuning.choose import REMEASURED, Answer, choose, find_result, speed_of
from autobatch.tuning.compare import LEAST_ROUNDS, changes
from autobatch.tuning.configuration import (
    CONSTRAINTS,
    ConfirmFits,
    Measure,
    Measurement,
    StoredResult,
    StudySpec,
)
from autobatch.tuning.drift import DriftingMachine
from autobatch.tuning.run_study import run_study

if TYPE_CHECKING:
    from autobatch.tuning.study import FinishedTrial, OptunaStudy, TrialRequest


PAYBACK_SHARE = 0.5
"""Share of the run's time that tuning may take: even a doubled speed would not pay back more."""


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


def find_fastest(
    measure: Measure,
    axes: Sequence[SearchAxis],
    *,
    budget: Budget,
    seed: int,
    place: StudyLocation,
    confirm_fits: ConfirmFits = lambda _: None,
    progress: Progress = SILENT,
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
        progress: receives every trial and every round of the comparison.
        clock: seconds.

    Returns:
        The best configuration; the default if nothing is faster beyond the noise.

    Raises:
        InputError: the storage failed, or the study was made for something else.
    """
    base = defaults(axes)
    study = _open_study(axes, budget, seed, place)
    remembered = study.finished()
    for line in _explain_remembered(remembered, budget):
        progress.note(line)
    started = datetime.datetime.now(tz=datetime.UTC).isoformat("T", "seconds")
    search = _Search(study, DriftingMachine(measure, base, started), budget, progress, clock, clock())
    sampler_seconds = run_study(
        study,
        search.run,
        trials=budget.trials,
        is_expired=lambda: budget.expired() or not search.has_time_to_try(),
        on_trial=search.report,
        clock=clock,
    )
    finished, is_stopped = study.finished(), not search.has_time_to_try()
    most = search.most_candidates()
    answer = choose(
        measure,
        finished,
        base,
        confirm_fits,
        progress,
        known=search.default(),
        is_expired=lambda: not search.pays_back(),
        most=most,
    )
    if is_stopped:
        stop = _explain_stop(len(finished), search.default(), budget)
        answer = answer._replace(notes=[*answer.notes, stop])
    is_old = any(answer.baseline == one.result for one in remembered)
    tuning = msgspec.structs.replace(
        _record(study, answer, finished),
        measured=answer.baseline.started if is_old and answer.baseline is not None else None,
        remembered=len(remembered),
        seconds=clock() - search.start,
        sampler_seconds=sampler_seconds,
    )
    return TuningResult(tuning, answer.winner)


class _Search(NamedTuple):
    """Surroundings of one search."""

    study: OptunaStudy[Measurement]
    machine: DriftingMachine
    budget: Budget
    progress: Progress
    clock: Callable[[], float]
    start: float

    def run(self, request: TrialRequest[Measurement]) -> Measurement:
        """Run a trial."""
        self.progress.doing(f"trial {len(self.study.finished()) + 1} of {self.budget.trials}")
        return self.machine.run(request.values)

    def report(self, request: TrialRequest[Measurement], found: Measurement) -> None:
        """Report a trial, unless its result was known."""
        if request.known is None:
            row = _row(len(self.study.finished()) - 1, request.values, found)
            self.progress.measured(row, self.budget.trials, changes(request.values, self.machine.default))

    def default(self) -> Measurement | None:
        """Return what was last measured of the default; None if it has not run."""
        return self.machine.latest or find_result(self.study.finished(), self.machine.default)

    def pays_back(self) -> bool:
        """Return whether the search has taken less time than the run can pay back."""
        return self._seconds_left() >= 0

    def has_time_to_try(self) -> bool:
        """Return whether one more trial, and a comparison with the default after it, can pay back.

        Without the comparison the default is kept, so that the trials before it would be wasted.
        """
        candidates = min(REMEASURED, self.machine.measured)
        runs = 1 + LEAST_ROUNDS * (1 + candidates) if candidates else 0
        return runs * self._run_seconds() <= self._seconds_left()

    def most_candidates(self) -> int | None:
        """Return how many configurations there is time to compare with the default; None for any number."""
        left, round_seconds = self._seconds_left(), LEAST_ROUNDS * self._run_seconds()
        if math.isinf(left) or not round_seconds:
            return None
        return max(1, int(left / round_seconds) - 1)

    def _seconds_left(self) -> float:
        return _worth_seconds(self.budget, self.default()) - (self.clock() - self.start)

    def _run_seconds(self) -> float:
        """Return the mean seconds of a measurement; 0 before the first one."""
        return (self.clock() - self.start) / self.machine.measured if self.machine.measured else 0.0


def _record(
    study: OptunaStudy[Measurement], answer: Answer, finished: Sequence[FinishedTrial[Measurement]]
) -> Tuning:
    return Tuning(
        trials=len(finished),
        best=answer.values,
        baseline_samples_per_s=speed_of(answer.baseline),
        best_samples_per_s=speed_of(answer.winner),
        study=study.name,
        history=[_row(number, one.values, one.result) for number, one in enumerate(finished)],
        comparisons=answer.comparisons,
        sampler=study.sampler,
        notes=answer.notes + study.notes,
    )


def _open_study(
    axes: Sequence[SearchAxis], budget: Budget, seed: int, place: StudyLocation
) -> OptunaStudy[Measurement]:
    # Only here: Optuna takes half a second to import.
    with warnings.catch_warnings():
        # Its progress bar, which nothing here shows, warns in notebooks without widgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from autobatch.tuning.study import OptunaStudy

    base = defaults(axes)

    def encode(found: Measurement) -> StoredResult:
        first = find_result(study.finished(), base)
        return _encode(found, reference=speed_of(first))

    spec = StudySpec(
        axes, "maximize", first_points=[base], encode=encode, decode=_decode, metric="samples per second"
    )
    study = OptunaStudy(
        spec,
        name=place.name,
        storage=place.storage,
        made_for={**place.made_for, **{axis.name: list(axis.choices) for axis in axes}},
        seed=seed,
        trials=budget.trials,
    )
    return study


def _encode(found: Measurement, *, reference: float) -> StoredResult:
    """Store a measurement.

    The study maximizes the speed that it would have had when the default ran at the speed ``reference``, the
    one of the first trial; 0 if that did not run.
    """
    speed = reference * found.relative if reference and found.relative else found.samples_per_s
    constraints = dict.fromkeys(CONSTRAINTS, -1.0) | dict(found.constraints)
    # The sampler fits one more Gaussian process for each constraint: the tightest one is enough.
    tightest = max(constraints, key=lambda name: constraints[name])
    return StoredResult(
        attributes=found._replace(constraints=constraints)._asdict(),
        constraint=(tightest, constraints[tightest]),
        value=speed if found.feasible else None,
    )


def _decode(_: Mapping[str, Value], attributes: Mapping[str, Any]) -> Measurement:
    stored = {name: attributes[name] for name in Measurement._fields if name in attributes}
    return Measurement(0.0, failure="no result was stored")._replace(**stored)


def _worth_seconds(budget: Budget, default: Measurement | None) -> float:
    """Return the seconds that the search may take, by the speed of the default configuration."""
    if budget.run_samples is None or default is None or not default.feasible:
        return math.inf
    return PAYBACK_SHARE * budget.run_samples / default.samples_per_s


def _explain_stop(trials: int, default: Measurement | None, budget: Budget) -> str:
    seconds = math.ceil(_worth_seconds(budget, default) / PAYBACK_SHARE)
    return (
        f"stopped tuning after {trials} of {budget.trials} trials: the run takes about {seconds:,} s, "
        f"so more trials cannot pay back. --trials {budget.trials} runs all of them"
    )


def _explain_remembered(finished: Sequence[FinishedTrial[Measurement]], budget: Budget) -> list[str]:
    """Return a note on the trials that earlier searches ran."""
    if not finished:
        return []
    dates = sorted({one.result.started for one in finished} - {""})
    since = f" from {dates[-1][:16].replace('T', ' ')} UTC" if dates else ""
    count = f"{len(finished)} trial{'s' if len(finished) > 1 else ''}"
    rest = budget.trials - len(finished)
    more = (
        f"{rest} more will run" if rest > 0 else f"no other runs, because --trials asks for {budget.trials}"
    )
    return [f"the study has {count}{since}; {more}"]


def _row(number: int, values: Configuration, found: Measurement) -> Trial:
    return Trial(
        number=number,
        samples_per_s=found.samples_per_s if found.feasible else None,
        feasible=found.feasible,
        parameters=dict(values),
        micro_batch=found.micro_batch or None,
        note=found.failure,
        relative=found.relative if found.feasible else None,
        started=found.started or None,
    )
