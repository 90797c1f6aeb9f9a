"""Search for the fastest configuration of a fixed target batch.

    ask ──► measure ──► tell ──► … ──► measure the best beside the default ──► confirm that it fits ──► answer

The largest micro-batch is not always the fastest. The default is the first trial. It is replaced only by a
configuration that is faster beyond the noise and has run inside the enforced budget.

A machine is faster one minute than the next, and a study may go on another day. So the default is measured
again at the start of a search that continues, and every few trials. Trials are compared by their ratio to it.
"""

from __future__ import annotations

import datetime
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from autobatch.core.knobs import Configuration, SearchAxis, Value, defaults
from autobatch.core.progress import SILENT, Progress
from autobatch.core.records import Trial, Tuning
from autobatch.tuning.compare import (
    LEAST_ROUNDS,
    MINIMUM_GAIN,
    MOST_ROUNDS,
    REMEASURED,
    Comparison,
    candidates,
    compare,
)
from autobatch.tuning.configuration import (
    Budget,
    Measure,
    Measurement,
    StudyLocation,
    changes,
    key_of,
    nearest_untried,
    size_of,
)

if TYPE_CHECKING:
    from autobatch.tuning.study import Request, StoredTrial, Study

PAYBACK_SHARE = 0.5
"""Share of the run's time that tuning may take: even a doubled speed would not pay back more."""
DEFAULT_EVERY = 5
"""Trials after which the default is measured again."""
STARTUP_SHARE = 4
"""One trial in this many is drawn at random, before a model is fitted."""
MOST_STARTUP = 10
"""Upper bound of the random trials."""

Tried = tuple[dict[str, Value], Measurement]


class TuningResult(NamedTuple):
    """The answer of a search."""

    tuning: Tuning
    winner: Measurement | None
    """Of the best configuration; None if the default was kept and could not be measured."""


def find_fastest(
    measure: Measure,
    confirm: Measure,
    axes: Sequence[SearchAxis],
    *,
    budget: Budget,
    seed: int,
    place: StudyLocation,
    progress: Progress = SILENT,
    clock: Callable[[], float] = time.monotonic,
) -> TuningResult:
    """Find the fastest configuration.

    Args:
        measure: runs a configuration; trials never run the same one twice.
        confirm: runs a configuration inside the enforced budget before it is chosen.
        axes: the choices of each knob.
        budget: trials and time.
        seed: the same seed and the same measurements give the same answer.
        place: the study.
        progress: receives every trial and every round of the comparison.
        clock: seconds.

    Returns:
        The best configuration; the default if nothing is faster beyond the noise.

    Raises:
        InputError: the storage failed, or the study was made for something else.
    """
    study = _open_study(axes, budget.trials, seed, place)
    search = _Search(study, measure, list(axes), budget, seed, progress, clock)
    remembered = search.tried()
    for line in _explain_remembered(remembered, budget):
        progress.note(line)
    search.run()
    tried, is_stopped = search.tried(), not search.has_time_to_try()
    tuning, winner = _choose(search, tried, confirm)
    notes = [*tuning.notes, *search.notes()]
    if is_stopped:
        notes.insert(len(tuning.notes), _explain_stop(len(tried), search.worth_seconds(), budget))
    is_old = winner is not None and winner in [found for _, found in remembered]
    tuning = msgspec.structs.replace(
        tuning,
        measured=winner.started if is_old and winner is not None else None,
        remembered=len(remembered),
        seconds=clock() - search.start,
        sampler_seconds=search.sampler_seconds,
        notes=notes,
    )
    return TuningResult(tuning, winner)


@dataclass
class _Search:
    """One search on a study."""

    study: Study
    measure: Measure
    axes: list[SearchAxis]
    budget: Budget
    seed: int
    progress: Progress
    clock: Callable[[], float]
    latest: Measurement | None = None
    """Of the default; None if it has not run in this search."""
    measured: int = 0
    """Measurements in this search."""
    since_default: int = 0
    """Trials since the default was measured."""
    sampler_seconds: float = 0.0
    """Time spent on choosing trials and on storing them."""

    def __post_init__(self) -> None:
        """Begin now."""
        self.start = self.clock()
        self.started = datetime.datetime.now(tz=datetime.UTC).isoformat("T", "seconds")
        self.default = defaults(self.axes)
        self.is_complete = size_of(self.axes) <= self.budget.trials

    def run(self) -> None:
        """Run trials until the budget is used up or every configuration is tried."""
        while len(self.tried()) < self.budget.trials and not self.budget.expired() and self.has_time_to_try():
            began = self.clock()
            request = self._next()
            self.sampler_seconds += self.clock() - began
            if request is None:
                return
            self.progress.doing(f"trial {len(self.tried()) + 1} of {self.budget.trials}")
            try:
                found = self._run_trial(request.params)
            except BaseException:
                self.study.fail(request)
                raise
            began = self.clock()
            self._store(request, found)
            self.sampler_seconds += self.clock() - began
            row = _row(len(self.tried()) - 1, request.params, found)
            self.progress.measured(row, self.budget.trials, changes(request.params, self.default))

    def tried(self) -> list[Tried]:
        """Return the configurations that have a result, in order, each once."""
        found: dict[object, Tried] = {}
        names = {axis.name for axis in self.axes}
        for trial in self.study.complete():
            if set(trial.params) == names:
                found.setdefault(key_of(trial.params), (trial.params, _decode(trial)))
        return list(found.values())

    def known_default(self) -> Measurement | None:
        """Return what was last measured of the default; None if it has not run."""
        return self.latest or next((found for values, found in self.tried() if values == self.default), None)

    def notes(self) -> list[str]:
        """Return a note for the user if the sampler failed."""
        if self.study.failure is None:
            return []
        return [f"Optuna's sampler failed ({self.study.failure}), so some trials were drawn at random"]

    def sampler(self) -> str:
        """Describe how trials are chosen."""
        return "every configuration" if self.is_complete else "a Gaussian process"

    def pays_back(self) -> bool:
        """Return whether the search has taken less time than the run can pay back."""
        return self._seconds_left() >= 0

    def has_time_to_try(self) -> bool:
        """Return whether one more trial, and a comparison with the default after it, can pay back.

        Without the comparison the default is kept, so that the trials before it would be wasted.
        """
        compared = min(REMEASURED, self.measured)
        runs = 1 + LEAST_ROUNDS * (1 + compared) if compared else 0
        return runs * self._run_seconds() <= self._seconds_left()

    def most_candidates(self) -> int | None:
        """Return how many configurations there is time to compare with the default; None for any number."""
        left, round_seconds = self._seconds_left(), LEAST_ROUNDS * self._run_seconds()
        if math.isinf(left) or not round_seconds:
            return None
        return max(1, int(left / round_seconds) - 1)

    def worth_seconds(self) -> float:
        """Return the seconds that the search may take, by the speed of the default configuration."""
        default = self.known_default()
        if self.budget.run_samples is None or default is None or not default.feasible:
            return math.inf
        return PAYBACK_SHARE * self.budget.run_samples / default.samples_per_s

    def _seconds_left(self) -> float:
        return self.worth_seconds() - (self.clock() - self.start)

    def _run_seconds(self) -> float:
        """Return the mean seconds of a measurement; 0 before the first one."""
        return (self.clock() - self.start) / self.measured if self.measured else 0.0

    def _next(self) -> Request | None:
        """Choose an untried configuration; None if there is none.

        Every second one is the neighbour of the best: neighbours find as much as the model does, and cost
        nothing to choose. Samplers repeat points by design: the known result of one is stored again.
        """
        while True:
            tried = {key_of(values): found for values, found in self.tried()}
            if len(tried) >= size_of(self.axes):
                return None
            is_random = len(tried) <= _startup(self.budget.trials)
            if (self.is_complete or (not is_random and len(tried) % 2)) and not self.study.has_waiting():
                self._enqueue_neighbour()
            request = self.study.ask()
            known = tried.get(key_of(request.params))
            if known is None:
                return request
            self._store(request, known)
            self._enqueue_neighbour()

    def _enqueue_neighbour(self) -> None:
        """Let the next trial be the untried configuration that is nearest to the best."""
        tried = self.tried()
        best = max(
            (one for one in tried if one[1].feasible),
            key=lambda one: one[1].relative or 0.0,
            default=(self.default, None),
        )[0]
        # Other processes run some; one that was killed has left its configuration untried.
        busy = {key_of(trial.params) for trial in self.study.running()}
        draw = random.Random(f"{self.seed} {self.study.num_trials()}")
        done = {key_of(values) for values, _ in tried}
        values = nearest_untried(self.axes, done | busy, best, draw) or nearest_untried(
            self.axes, done, best, draw
        )
        if values is not None:
            self.study.enqueue(values)

    def _run_trial(self, values: Configuration) -> Measurement:
        """Measure a configuration, and the default beside it if that was long ago."""
        if values == self.default:
            found = self._run_default()
        else:
            is_due = self.latest is None or (self.latest.feasible and self.since_default >= DEFAULT_EVERY)
            if is_due:
                self._run_default()
            self.measured += 1
            self.since_default += 1
            found = self.measure(values)
        default = self.latest.samples_per_s if self.latest is not None else 0.0
        return found._replace(default_samples_per_s=default, started=self.started)

    def _run_default(self) -> Measurement:
        self.measured += 1
        self.since_default = 0
        self.latest = self.measure(self.default)
        return self.latest

    def _store(self, request: Request, found: Measurement) -> None:
        """Store a measurement.

        The study maximizes the speed that it would have had when the default ran at the speed of its first
        trial.
        """
        first = next((one for values, one in self.tried() if values == self.default), None)
        speed = found.samples_per_s
        if first is not None and first.samples_per_s and found.relative:
            speed = first.samples_per_s * found.relative
        value = speed if found.feasible else None
        self.study.tell(request, value, found._asdict(), is_feasible=found.feasible)


def _choose(search: _Search, tried: Sequence[Tried], confirm: Measure) -> tuple[Tuning, Measurement | None]:
    """Compare the best trials with the default, and return the best that fits."""
    default, known, progress = search.default, search.known_default(), search.progress
    baseline = known if known is not None and known.feasible else None
    others = candidates(tried, default, baseline)[: search.most_candidates()] if baseline else []
    found = Comparison(baseline, [], [])
    if others and search.pays_back():

        def on_round(number: int, running: int) -> None:
            progress.doing(
                f"comparing the best {running} with the default, round {number} of at most {MOST_ROUNDS}"
            )

        found = compare(search.measure, default, others, lambda: not search.pays_back(), on_round)
    notes = []
    best = None
    for one in found.ranking:
        progress.doing("checking that the choice fits in memory")
        reason = confirm(one.values).failure
        if reason is None:
            best = one
            break
        notes.append(f"left out a faster configuration, because it does not fit: {reason}")
    notes += _explain(tried, found, known)
    winner = found.baseline if best is None else found.speed_of(best)
    records = [one.record(default, chosen=one is best) for one in found.contenders if one.ratios]
    tuning = Tuning(
        trials=len(tried),
        best=default if best is None else best.values,
        baseline_samples_per_s=0.0 if found.baseline is None else found.baseline.samples_per_s,
        best_samples_per_s=0.0 if winner is None else winner.samples_per_s,
        study=search.study.name,
        history=[_row(number, *one) for number, one in enumerate(tried)],
        comparisons=sorted(records, key=lambda one: -one.ratio),
        sampler=search.sampler(),
        notes=notes,
    )
    return tuning, winner


def _open_study(axes: Sequence[SearchAxis], trials: int, seed: int, place: StudyLocation) -> Study:
    # Only here: Optuna takes half a second to import.
    with warnings.catch_warnings():
        # Its progress bar, which nothing here shows, warns in notebooks without widgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from autobatch.tuning.study import study_of_configurations

    choices = {axis.name: list(axis.choices) for axis in axes}
    place = place._replace(made_for={**place.made_for, **choices})
    return study_of_configurations(place, axes, seed=seed, startup=_startup(trials))


def _startup(trials: int) -> int:
    """Return the number of trials that are drawn at random, before a model is fitted."""
    return min(MOST_STARTUP, max(2, trials // STARTUP_SHARE))


def _decode(trial: StoredTrial) -> Measurement:
    stored = {name: trial.user_attrs[name] for name in Measurement._fields if name in trial.user_attrs}
    return Measurement(0.0, failure="no result was stored")._replace(**stored)


def _explain(tried: Sequence[Tried], found: Comparison, known: Measurement | None) -> list[str]:
    """Return notes for the user on why the default was kept, one per line."""
    if not tried:
        return ["kept the plan: no trial was run"]
    if not any(one.feasible for _, one in tried):
        first = known or tried[0][1]
        return [f"kept the plan: none of {len(tried)} configurations ran. The first one: {first.failure}"]
    if found.baseline is None:
        failure = "it was not run" if known is None else known.failure
        return [f"kept the plan: the default configuration could not be measured ({failure})"]
    if not found.ranking and found.contenders:
        return [f"kept the default: no other was faster by {100 * MINIMUM_GAIN:g} % beyond the noise"]
    return []


def _explain_stop(trials: int, worth_seconds: float, budget: Budget) -> str:
    seconds = math.ceil(worth_seconds / PAYBACK_SHARE)
    return (
        f"stopped tuning after {trials} of {budget.trials} trials: the run takes about {seconds:,} s, "
        f"so more trials cannot pay back. --trials {budget.trials} runs all of them"
    )


def _explain_remembered(tried: Sequence[Tried], budget: Budget) -> list[str]:
    """Return a note on the trials that earlier searches ran."""
    if not tried:
        return []
    dates = sorted({found.started for _, found in tried} - {""})
    since = f" from {dates[-1][:16].replace('T', ' ')} UTC" if dates else ""
    count = f"{len(tried)} trial{'s' if len(tried) > 1 else ''}"
    rest = budget.trials - len(tried)
    no_more = f"no other runs, because --trials asks for {budget.trials}"
    return [f"the study has {count}{since}; {f'{rest} more will run' if rest > 0 else no_more}"]


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
