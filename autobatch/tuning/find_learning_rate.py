"""Search for the learning rate that lowers the loss most in a few optimizer steps.

    ask ──► short run ──► tell ──► … ──► run the best beside the default on other data ──► answer

The best of many noisy figures is too good to be true. So it runs again beside the default on batches that
other seeds draw. It replaces the default only if it is better every time, and on average beyond the noise
(Student's t, one-sided, 97.5 %). A gain is a share of the loss reduction, because a loss has no zero of its
own. The learning rate that lowers the loss most in a short run need not do so in a long one (Wu et al. 2018,
arXiv:1803.02021).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from autobatch.core.knobs import Value
from autobatch.core.progress import SILENT, Progress
from autobatch.core.records.tuning import LrComparison, LrTrial, LrTuning
from autobatch.tuning.compare import STUDENT
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
MINIMUM_GAIN = 0.02
"""Share of the loss reduction that a learning rate must gain over the default to replace it."""
OTHER_SEEDS = 2
"""Number of further data orders that decide."""
DIVERGED = 2.0
"""A run has diverged if its last loss exceeds this multiple of its first."""
EDGE_FACTOR = 1.5
"""Within this factor of a bound of the range, the best may lie beyond."""


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
        notes=[*_explain(task.default, finished, best, pairs), *study.notes],
    )


def decide(pairs: Sequence[LrComparison]) -> bool:
    """Return whether the other learning rate is better in every pair, and on average beyond the noise."""
    gains = [pair.gain for pair in pairs]
    if len(gains) < 2 or not all(gain > 0 for gain in gains):
        return False
    mean = statistics.fmean(gains)
    half = STUDENT[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    return mean > MINIMUM_GAIN and mean - half > 0


def gain_over(default: LrTrialResult, other: LrTrialResult) -> float:
    """Return the share of the loss reduction that a learning rate gains over the default.

    Returns:
        1 if only the default does not train; -1 if the other does not, and never less.
    """
    if other.failure is not None or other.loss is None or other.first is None or other.loss >= other.first:
        return -1.0
    if default.failure is not None or default.loss is None:
        return 1.0
    return max(-1.0, (default.loss - other.loss) / (other.first - other.loss))


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
    yield _pair(seed, known, best)
    for number in range(1, OTHER_SEEDS + 1):
        other = (seed + number) % 2**31
        order = [known.rate, best.rate] if number % 2 else [best.rate, known.rate]
        found = {rate: _run(runs, task, rate, other) for rate in order}
        yield _pair(other, found[known.rate], found[best.rate])


def _pair(seed: int, default: LrTrialResult, other: LrTrialResult) -> LrComparison:
    return LrComparison(
        seed=seed, default_loss=default.loss, other_loss=other.loss, gain=gain_over(default, other)
    )


def _explain(
    default: float,
    finished: Sequence[LrTrialResult],
    best: LrTrialResult | None,
    pairs: Sequence[LrComparison],
) -> list[str]:
    """Return notes for the user on the answer, one per line."""
    kept = f"kept learning rate {default:.3g}"
    known = next((one for one in finished if one.rate == default), None)
    if known is None:
        return [f"{kept}: its own trial was not run"]
    if best is None:
        return [f"{kept}: none of {len(finished)} learning rates trained. The default one: {known.failure}"]
    if best.rate == default:
        return [f"{kept}: no other one reached a lower loss than this default"]
    if not decide(pairs):
        gains = [pair.gain for pair in pairs]
        shown = ", ".join(f"{100 * gain:+.1f} %" for gain in gains)
        is_small = statistics.fmean(gains) <= MINIMUM_GAIN
        reason = f"below the required {100 * MINIMUM_GAIN:+g} %" if is_small else "within noise"
        return [
            f"{kept}: {best.rate:.3g} changed the loss reduction by {shown} on {len(gains)} data orders, "
            f"{reason}"
        ]
    if max(best.rate / default, default / best.rate) > REACH / EDGE_FACTOR:
        return [
            f"learning rate {best.rate:.3g} is at the edge of the tried range, {default / REACH:.3g} to "
            f"{default * REACH:.3g}. A better one may lie beyond it"
        ]
    return []


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
