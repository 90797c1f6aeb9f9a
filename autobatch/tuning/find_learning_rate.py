"""The search for the learning rate that lowers the loss most in a few optimizer steps.

    ask ──► a short run ──► tell ──► … ──► the best beside the default, on other data ──► answer

The best of many noisy figures is too good to be true. So it is run again beside the default on windows that
other seeds draw, and the default stays unless the other does better every time, and on average beyond the
noise (Student's t, one-sided, 97.5 %). A gain is told as a share of the fall of the loss: a loss has no zero
of its own. What lowers the loss most in a short run need not do so in a long one (Wu et al. 2018,
arXiv:1803.02021).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from autobatch.core.records import LrComparison, LrTrial, LrTuning
from autobatch.tuning.compare import STUDENT
from autobatch.tuning.find_fastest import Budget, StudyLocation
from autobatch.tuning.lr_trial import PARTS, REACH, LrTrialResult, LrTrialSpec, Runs, Segment, parts_of

if TYPE_CHECKING:
    from autobatch.tuning.study import LrStudy, LrTrialRequest


MINIMUM_GAIN = 0.02
"""Share of the fall of the loss that a learning rate must gain over the default to replace it."""


OTHER_SEEDS = 2
"""Further draws of the data that decide."""


DIVERGED = 2.0
"""A run whose loss ends over this many times the one that it began with has diverged."""


NEAR_THE_END = 1.5
"""Within this factor of the end of what is tried, the best may lie beyond."""


OnLrTrial = Callable[[int, float, float | None, str | None], None]
"""Told of a trial: its number from 1, the learning rate, its loss, and why it is left out."""


def find_learning_rate(
    runs: Runs,
    task: LrTrialSpec,
    *,
    budget: Budget,
    seed: int,
    place: StudyLocation,
    progress: OnLrTrial = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> LrTuning:
    """Find the learning rate after which the loss is lowest.

    Args:
        runs: trains short runs.
        task: what they train, and the learning rate that stays unless another is better.
        budget: trials and time.
        seed: of the data in the trials, and of what is asked; same seed, same answer.
        place: the study.
        progress: told of each trial.
        clock: seconds.

    Returns:
        The best learning rate; the default, where none is better beyond the noise.

    Raises:
        InputError: the storage cannot be used, or the study was made for something else.
        Exception: what the workload raises at its default.
    """
    from autobatch.tuning.study import LrStudy

    start = clock()
    study = LrStudy(
        task.default,
        name=place.name,
        storage=place.storage,
        made_for=place.made_for,
        seed=seed,
        trials=budget.trials,
    )
    while study.taken() < budget.trials and not budget.expired():
        asked = study.ask()
        try:
            tried = asked.known or _try(runs, task, study, asked, seed)
        except BaseException:
            study.abandon(asked)
            raise
        study.tell(asked, tried)
        progress(len(study.finished()), tried.rate, tried.loss, tried.failure)
    finished = study.finished()
    known = next((one for one in finished if one.rate == task.default), None)
    best = min((one for one in finished if one.failure is None), key=_loss, default=None)
    pairs: list[LrComparison] = []
    if known is not None and best is not None and best.rate != task.default:
        pairs = list(_pairs(runs, task, known, best, seed))
    is_better = decide(pairs)
    chosen = best if is_better and best is not None else known
    return LrTuning(
        trials=len(finished),
        steps=task.steps,
        default=task.default,
        best=best.rate if is_better and best is not None else task.default,
        default_loss=None if known is None else known.loss,
        best_loss=None if chosen is None else chosen.loss,
        study=study.name,
        history=[_row(number, one) for number, one in enumerate(finished)],
        pairs=pairs,
        sampler=study.sampler,
        seconds=clock() - start,
        notes=[*_why(finished, known, best, pairs, is_better=is_better), *study.notes],
    )


def decide(pairs: Sequence[LrComparison]) -> bool:
    """Whether the other learning rate is better than the default in every pair, and beyond the noise."""
    gains = [pair.gain for pair in pairs]
    if len(gains) < 2 or not all(gain > 0 for gain in gains):
        return False
    mean = statistics.fmean(gains)
    half = STUDENT[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    return mean > MINIMUM_GAIN and mean - half > 0


def gain_over(default: LrTrialResult, other: LrTrialResult) -> float:
    """Share of the fall of the loss that a learning rate gains over the default; 1 over one that diverges."""
    if other.failure is not None or other.loss is None or other.first is None or other.loss >= other.first:
        return -1.0
    if default.failure is not None or default.loss is None:
        return 1.0
    return max(-1.0, (default.loss - other.loss) / (other.first - other.loss))


def _try(runs: Runs, task: LrTrialSpec, study: LrStudy, asked: LrTrialRequest, seed: int) -> LrTrialResult:
    """Run a trial, to its end unless the pruner has seen enough."""

    def is_hopeless(number: int, loss: float) -> bool:
        return study.is_hopeless(asked, number, loss)

    return _run(runs, task, asked.rate, seed, is_hopeless)


def _run(
    runs: Runs,
    task: LrTrialSpec,
    rate: float,
    seed: int,
    is_hopeless: Callable[[int, float], bool] = lambda *_: False,
) -> LrTrialResult:
    part = Segment(None, None)
    with closing(runs.losses(rate, seed)) as windows:
        for number, part in enumerate(parts_of(windows, task.steps), 1):
            if part.failure is not None or part.loss is None:
                return LrTrialResult(rate, None, part.first, part.failure or "none of its losses is finite")
            if number < PARTS and is_hopeless(number, part.loss):
                failure = f"ended after {number} of {PARTS} parts, worse than the median by then"
                return LrTrialResult(rate, part.loss, part.first, failure)
    return LrTrialResult(rate, part.loss, part.first, _divergence(part))


def _divergence(last: Segment) -> str | None:
    """What is said of a run whose loss grew."""
    if last.loss is None or last.first is None or last.loss - last.first <= (DIVERGED - 1) * abs(last.first):
        return None
    return f"it diverged: the loss went from {last.first:.4g} to {last.loss:.4g}"


def _pairs(
    runs: Runs, task: LrTrialSpec, known: LrTrialResult, best: LrTrialResult, seed: int
) -> Iterator[LrComparison]:
    """The default and the best on the same data: that of the study, and others; each goes first in turn."""
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


def _why(
    finished: Sequence[LrTrialResult],
    known: LrTrialResult | None,
    best: LrTrialResult | None,
    pairs: Sequence[LrComparison],
    *,
    is_better: bool,
) -> list[str]:
    """What a person should know of the answer, beyond its figures."""
    if known is None:
        return ["no trial of the default learning rate was run, so it stays"]
    if best is None:
        return [f"none of {len(finished)} learning rates trained, so the default stays; it: {known.failure}"]
    if best.rate == known.rate:
        return ["no other learning rate did better in the trials than the default, which stays"]
    if not is_better:
        gains = ", ".join(f"{pair.gain:+.1%}" for pair in pairs)
        return [
            f"the default learning rate stays: beside it, {best.rate:.3g} gained {gains} of the fall of the "
            "loss on different data, which is not beyond the noise"
        ]
    if max(best.rate / known.rate, known.rate / best.rate) > REACH / NEAR_THE_END:
        return [f"{best.rate:.3g} is at the end of what was tried: a better one may lie beyond it"]
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
