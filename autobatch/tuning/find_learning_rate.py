"""Search for the learning rate that lowers the loss most in a few optimizer steps.

    ask ──► short run ──► tell ──► … ──► run the best beside the default on other data ──► answer

`autobatch.tuning.compare_rates` decides whether the best replaces the default. The learning rate that lowers
the loss most in a short run need not do so in a long one (Wu et al. 2018, arXiv:1803.02021).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from autobatch.core.knobs import Value
from autobatch.core.progress import SILENT, Progress
from autobatch.core.records.tuning import LrComparison, LrTrial, LrTuning
from autobatch.tuning.compare_rates import compare, decide, explain
from autobatch.tuning.configuration import LogRange, MedianStop, StoredResult, StudySpec
from autobatch.tuning.find_fastest import Budget, StudyLocation
from autobatch.tuning.lr_trial import PARTS, REACH, LrTrialResult, LrTrialSpec, Runs, Segment, parts_of
from autobatch.tuning.run_study import run_study

if TYPE_CHECKING:
    from autobatch.tuning.study import OptunaStudy, TrialRequest


RATE = "learning_rate"
FIRST_FACTORS = (1.0, 4.0, 1 / 4, 16.0, 1 / 16)
"""First trials as multiples of the default: they cover the range before a model is fitted."""
EARLY_STOP = MedianStop(startup_trials=4, warmup_steps=PARTS // 2)
"""Half of each run is safe, because a small learning rate is slow at first."""
CONSTRAINT = "does_not_train"
"""Constraint: the run diverged, was stopped, or raised an error."""
OTHER_SEEDS = 2
"""Number of further data orders that decide."""
DIVERGED = 2.0
"""A run has diverged if its last loss exceeds this multiple of its first."""


def find_learning_rate(
    runs: Runs,
    task: LrTrialSpec,
    *,
    budget: Budget,
    seed: int,
    place: StudyLocation,
    progress: Progress = SILENT,
    clock: Callable[[], float] = time.monotonic,
) -> LrTuning:
    """Find the learning rate after which the loss is lowest.

    Args:
        runs: trains short runs.
        task: what they train, with the default learning rate.
        budget: trials and time.
        seed: of the trials' data and of the sampler; the same seed gives the same answer.
        place: the study.
        progress: receives every trial.
        clock: seconds.

    Returns:
        The best learning rate; the default if none is better beyond the noise.

    Raises:
        InputError: the storage failed, or the study was made for something else.
        Exception: whatever the workload raises at the default learning rate.
    """
    start = clock()
    study = _open_study(task.default, budget, seed, place)
    finished = _try_rates(runs, task, study, budget, seed=seed, progress=progress)
    known = next((one for one in finished if one.rate == task.default), None)
    best = min((one for one in finished if one.failure is None), key=_loss, default=None)
    pairs: list[LrComparison] = []
    if known is not None and best is not None and best.rate != task.default:
        progress.doing(f"comparing {best.rate:.3g} with {known.rate:.3g} on other data")
        pairs = list(_compare(runs, task, known, best, seed))
    chosen = best if decide(pairs) else known
    return LrTuning(
        trials=len(finished),
        steps=task.steps,
        default=task.default,
        best=task.default if chosen is None else chosen.rate,
        default_loss=None if known is None else known.loss,
        best_loss=None if chosen is None else chosen.loss,
        study=study.name,
        history=[_row(number, one) for number, one in enumerate(finished)],
        pairs=pairs,
        sampler=study.sampler,
        seconds=clock() - start,
        notes=[*explain(task.default, finished, best, pairs), *study.notes],
    )


def _open_study(
    default: float, budget: Budget, seed: int, place: StudyLocation
) -> OptunaStudy[LrTrialResult]:
    # Only here: Optuna takes half a second to import.
    from autobatch.tuning.study import OptunaStudy

    spec = StudySpec(
        LogRange(RATE, default / REACH, default * REACH),
        "minimize",
        first_points=[{RATE: default * factor} for factor in FIRST_FACTORS],
        encode=_encode,
        decode=_decode,
        metric="loss",
        early_stop=EARLY_STOP,
    )
    return OptunaStudy(
        spec,
        name=place.name,
        storage=place.storage,
        made_for=place.made_for,
        seed=seed,
        trials=budget.trials,
    )


def _encode(tried: LrTrialResult) -> StoredResult:
    return StoredResult(
        attributes={"loss": tried.loss, "first": tried.first, "failure": tried.failure},
        constraint=(CONSTRAINT, -1.0 if tried.failure is None else 1.0),
        value=tried.loss,
        fallback=tried.first or 0.0,
    )


def _decode(values: Mapping[str, Value], attributes: Mapping[str, Any]) -> LrTrialResult:
    return LrTrialResult(
        float(values[RATE] or 0.0),
        attributes.get("loss"),
        attributes.get("first"),
        attributes.get("failure", "no result was stored"),
    )


def _try_rates(
    runs: Runs,
    task: LrTrialSpec,
    study: OptunaStudy[LrTrialResult],
    budget: Budget,
    *,
    seed: int,
    progress: Progress,
) -> list[LrTrialResult]:
    """Run the trials of a study, and return all that it has."""
    run_study(
        study,
        lambda request: _run_trial(runs, task, study, request, seed=seed, progress=progress),
        trials=budget.trials,
        is_expired=budget.expired,
        on_trial=lambda _, tried: progress.tried_rate(
            len(study.finished()), budget.trials, tried.rate, tried.loss, tried.failure
        ),
    )
    return [one.result for one in study.finished()]


def _run_trial(
    runs: Runs,
    task: LrTrialSpec,
    study: OptunaStudy[LrTrialResult],
    request: TrialRequest[LrTrialResult],
    *,
    seed: int,
    progress: Progress,
) -> LrTrialResult:
    """Run a trial until its end, or until the study stops it; the default always runs to its end."""
    progress.doing(f"learning rate {len(study.finished()) + 1}: a run of {task.steps} steps")
    rate = float(request.values[RATE] or 0.0)

    def should_stop(part: int, loss: float) -> bool:
        return study.should_stop(request, part, loss) and rate != task.default

    return _run(runs, task, rate, seed, should_stop)


def _run(
    runs: Runs,
    task: LrTrialSpec,
    rate: float,
    seed: int,
    should_stop: Callable[[int, float], bool] = lambda *_: False,
) -> LrTrialResult:
    """Train at a learning rate.

    Args:
        runs: trains short runs.
        task: what they train.
        rate: the learning rate.
        seed: of the data.
        should_stop: asked with the number of each part but the last, from 1, and its loss.
    """
    part = Segment(None, None)
    with closing(runs.losses(rate, seed)) as losses:
        for number, part in enumerate(parts_of(losses, task.steps), 1):
            if part.failure is not None or part.loss is None:
                return LrTrialResult(rate, None, part.first, part.failure or "no loss was finite")
            if number < PARTS and should_stop(number, part.loss):
                failure = f"stopped after {number} of {PARTS} parts: its loss was worse than the median"
                return LrTrialResult(rate, part.loss, part.first, failure)
    return LrTrialResult(rate, part.loss, part.first, _divergence(part))


def _divergence(last: Segment) -> str | None:
    """Return why a run has diverged, or None if it has not."""
    if last.loss is None or last.first is None or last.loss - last.first <= (DIVERGED - 1) * abs(last.first):
        return None
    return f"diverged: the loss rose from {last.first:.4g} to {last.loss:.4g}"


def _compare(
    runs: Runs, task: LrTrialSpec, known: LrTrialResult, best: LrTrialResult, seed: int
) -> Iterator[LrComparison]:
    """Compare the default with the best on the study's data and on other data; each goes first in turn."""
    yield compare(seed, known, best)
    for number in range(1, OTHER_SEEDS + 1):
        other = (seed + number) % 2**31
        order = [known.rate, best.rate] if number % 2 else [best.rate, known.rate]
        found = {rate: _run(runs, task, rate, other) for rate in order}
        yield compare(other, found[known.rate], found[best.rate])


def _row(number: int, one: LrTrialResult) -> LrTrial:
    return LrTrial(
        number=number,
        learning_rate=one.rate,
        loss=one.loss,
        feasible=one.failure is None,
        note=one.failure,
    )


def _loss(one: LrTrialResult) -> float:
    return math.inf if one.loss is None else one.loss
