"""Search for the fastest configuration of a fixed target batch.

    ask ──► measure ──► tell ──► … ──► measure the best beside the default ──► confirm that it fits ──► answer

The largest micro-batch is not always the fastest. The default is the first trial. It is replaced only by a
configuration that is faster beyond the noise and has run inside the enforced budget.

The speed of a machine changes from minute to minute, and a study may continue on another day. So the default
is measured again at the start of a search that continues, and every few trials. Trials are compared by their
ratio to it.
"""

from __future__ import annotations

import datetime
import math
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from autobatch.core.knobs import Configuration, SearchAxis, defaults
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
    Key,
    Measure,
    Measurement,
    StudyLocation,
    all_configurations,
    changes,
    key_of,
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

DEFAULT_SPEED = "default_samples_per_s"
"""Name of the default's speed around the same time, in the stored result of a trial; 0 if unknown."""


class TuningResult(NamedTuple):
    """The answer of a search."""

    tuning: Tuning
    micro_batch: int
    """Of the best configuration, in samples; 0 if the default was kept and could not be measured."""


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
    search = _Search(study, measure, axes, budget, seed, progress, clock)
    remembered = search.tried()
    if remembered:
        progress.note(_describe_remembered(remembered, budget))
    search.run()
    found = _choose(search, confirm)
    tuning = msgspec.structs.replace(
        found.tuning,
        remembered=len(remembered),
        seconds=search.seconds(),
        sampler_seconds=search.sampler_seconds,
    )
    return found._replace(tuning=tuning)


@dataclass
class _Search:
    """One search on a study."""

    study: Study
    measure: Measure
    axes: Sequence[SearchAxis]
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
    start: float = field(init=False)

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
            default = 0.0 if self.latest is None else self.latest.samples_per_s
            self._store(request, {**found._asdict(), DEFAULT_SPEED: default, "started": self.started})
            self.sampler_seconds += self.clock() - began
            trial = self.tried()[-1]
            self.progress.measured(trial, self.budget.trials, changes(trial.parameters, self.default))

    def tried(self) -> list[Trial]:
        """Return the trials that have a result, in order, each configuration once."""
        return [_record(number, trial) for number, trial in enumerate(self._stored().values())]

    def stored_default(self) -> Trial | None:
        """Return the trial of the default; None if the study has none."""
        return next((one for one in self.tried() if one.parameters == self.default), None)

    def seconds(self) -> float:
        """Return the seconds that the search has taken."""
        return self.clock() - self.start

    def worth_seconds(self) -> float:
        """Return the seconds that the search may take, by the speed of the default configuration."""
        default = self.latest or self.stored_default()
        speed = 0.0 if default is None or not default.feasible else default.samples_per_s
        if self.budget.run_samples is None or not speed:
            return math.inf
        return PAYBACK_SHARE * self.budget.run_samples / speed

    def has_time_to_try(self) -> bool:
        """Return whether one more trial, and a comparison with the default after it, can pay back.

        Without the comparison the default is kept, so that the trials before it would be wasted.
        """
        compared = min(REMEASURED, self.measured)
        runs = 1 + LEAST_ROUNDS * (1 + compared) if compared else 0
        return runs * self._run_seconds() <= self.worth_seconds() - self.seconds()

    def most_candidates(self) -> int | None:
        """Return how many configurations there is time to compare with the default; None for any number."""
        left, round_seconds = self.worth_seconds() - self.seconds(), LEAST_ROUNDS * self._run_seconds()
        if math.isinf(left) or not round_seconds:
            return None
        return max(1, int(left / round_seconds) - 1)

    def _run_seconds(self) -> float:
        """Return the mean seconds of a measurement; 0 before the first one."""
        return self.seconds() / self.measured if self.measured else 0.0

    def _stored(self) -> dict[Key, StoredTrial]:
        """Return the first result of each configuration, in order."""
        found: dict[Key, StoredTrial] = {}
        for trial in self.study.trials("complete"):
            if trial.params.keys() == self.default.keys():
                found.setdefault(key_of(trial.params), trial)
        return found

    def _next(self) -> Request | None:
        """Choose an untried configuration; None if there is none.

        Every second one is the neighbour of the best: neighbours find as much as the model does, and cost
        nothing to choose. Samplers repeat points by design: the known result of one is stored again.
        """
        while True:
            known = self._stored()
            if len(known) >= size_of(self.axes):
                return None
            is_random = len(known) <= _startup(self.budget.trials)
            if (self.is_complete or (not is_random and len(known) % 2)) and not self.study.trials("waiting"):
                self._enqueue_neighbour()
            request = self.study.ask()
            repeated = known.get(key_of(request.params))
            if repeated is None:
                return request
            self._store(request, repeated.user_attrs)
            self._enqueue_neighbour()

    def _enqueue_neighbour(self) -> None:
        """Let the next trial be an untried configuration that differs from the best in the fewest knobs."""
        feasible = [one for one in self.tried() if one.feasible]
        best = max(feasible, key=lambda one: one.relative or 0.0, default=None)
        base = self.default if best is None else best.parameters
        done = self._stored()
        untried = [values for values in all_configurations(self.axes) if key_of(values) not in done]
        # Other processes run some; one that was killed has left its configuration untried.
        busy = {key_of(trial.params) for trial in self.study.trials("running")}
        free = [values for values in untried if key_of(values) not in busy] or untried
        if free:
            nearest = min(len(changes(values, base)) for values in free)
            near = [values for values in free if len(changes(values, base)) == nearest]
            self.study.enqueue(random.Random(f"{self.seed} {len(self.study.trials())}").choice(near))

    def _run_trial(self, values: Configuration) -> Measurement:
        """Measure a configuration, and the default before it if that was long ago."""
        if values == self.default:
            return self._run_default()
        if self.latest is None or (self.latest.feasible and self.since_default >= DEFAULT_EVERY):
            self._run_default()
        self.measured += 1
        self.since_default += 1
        return self.measure(values)

    def _run_default(self) -> Measurement:
        self.measured += 1
        self.since_default = 0
        self.latest = self.measure(self.default)
        return self.latest

    def _store(self, request: Request, result: Mapping[str, Any]) -> None:
        """Store the result of a trial.

        The study maximizes the speed that it would have had when the default ran at the speed of its first
        trial.
        """
        first, default = self.stored_default(), result[DEFAULT_SPEED]
        speed = result["samples_per_s"]
        if first is not None and first.samples_per_s and default:
            speed *= first.samples_per_s / default
        is_feasible = result["failure"] is None
        self.study.tell(request, speed if is_feasible else None, result, is_feasible=is_feasible)


def _choose(search: _Search, confirm: Measure) -> TuningResult:
    """Compare the best trials with the default, and return the best that fits."""
    tried, default, progress = search.tried(), search.default, search.progress
    is_stopped, worth_seconds = not search.has_time_to_try(), search.worth_seconds()
    stored = search.stored_default()
    known = search.latest
    if known is None and stored is not None:
        known = Measurement(stored.samples_per_s or 0.0, stored.micro_batch or 0, stored.note)
    found = Comparison(known if known is not None and known.feasible else None)
    others = candidates(tried, default, found.baseline) if found.baseline else []
    if others and search.seconds() <= worth_seconds:
        found = compare(
            search.measure,
            default,
            others[: search.most_candidates()],
            lambda: search.seconds() > search.worth_seconds(),
            lambda number, running: progress.doing(
                f"comparing the best {running} with the default, round {number} of at most {MOST_ROUNDS}"
            ),
        )
    best, notes = None, []
    for one in found.ranking:
        progress.doing("checking that the choice fits in memory")
        reason = confirm(one.values).failure
        if reason is None:
            best = one
            break
        notes.append(f"left out a faster configuration, because it does not fit: {reason}")
    notes += _explain(tried, found, known)
    if is_stopped:
        notes.append(
            f"tuning stopped after {len(tried)} of {search.budget.trials} trials: training takes only about "
            f"{math.ceil(worth_seconds / PAYBACK_SHARE):,} s, and further trials would cost more time than "
            f"they can save. To run them all, give --trials {search.budget.trials}"
        )
    if search.study.failure is not None:
        failure = search.study.failure
        notes.append(f"Optuna's sampler failed ({failure}), so some trials were drawn at random")
    winner = found.baseline if best is None else found.speed_of(best)
    is_old = found.baseline is not None and found.baseline is known and search.latest is None
    records = [one.record(default, chosen=one is best) for one in found.contenders if one.ratios]
    tuning = Tuning(
        trials=len(tried),
        best=default if best is None else best.values,
        baseline_samples_per_s=0.0 if found.baseline is None else found.baseline.samples_per_s,
        best_samples_per_s=0.0 if winner is None else winner.samples_per_s,
        study=search.study.name,
        measured=stored.started if is_old and stored is not None else None,
        history=tried,
        comparisons=sorted(records, key=lambda one: -one.ratio),
        sampler="every configuration" if search.is_complete else "a Gaussian process",
        notes=notes,
    )
    return TuningResult(tuning, 0 if winner is None else winner.micro_batch)


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


def _record(number: int, trial: StoredTrial) -> Trial:
    """Return the record of a trial in the storage."""
    result = {"failure": "no result was stored", **trial.user_attrs}
    is_feasible, default = result["failure"] is None, result.get(DEFAULT_SPEED)
    speed = result.get("samples_per_s", 0.0)
    return Trial(
        number=number,
        samples_per_s=speed if is_feasible else None,
        feasible=is_feasible,
        parameters=dict(trial.params),
        micro_batch=result.get("micro_batch") or None,
        note=result["failure"],
        relative=speed / default if is_feasible and default else None,
        started=result.get("started"),
    )


def _explain(tried: Sequence[Trial], found: Comparison, known: Measurement | None) -> list[str]:
    """Return notes for the user on why the default was kept, one per line."""
    if not tried:
        return ["kept the plan: no trial was run"]
    if not any(one.feasible for one in tried):
        reason = tried[0].note if known is None else known.failure
        return [f"kept the plan: none of {len(tried)} configurations ran. The first one: {reason}"]
    if found.baseline is None:
        failure = "it was not run" if known is None else known.failure
        return [f"kept the plan: the default configuration could not be measured ({failure})"]
    if not found.ranking and found.contenders:
        return [f"kept the default: no other was faster by {100 * MINIMUM_GAIN:g} % beyond the noise"]
    return []


def _describe_remembered(tried: Sequence[Trial], budget: Budget) -> str:
    """Return a note on the trials that earlier searches ran."""
    dates = sorted(one.started for one in tried if one.started)
    since = f" from {dates[-1][:16].replace('T', ' ')} UTC" if dates else ""
    count = f"{len(tried)} trial{'s' if len(tried) > 1 else ''}"
    rest = budget.trials - len(tried)
    next_ = (
        f"At most {rest} more will run" if rest > 0 else f"None is added: --trials asks for {budget.trials}"
    )
    return f"an earlier run{since} left {count} of this workload, which count. {next_}"
