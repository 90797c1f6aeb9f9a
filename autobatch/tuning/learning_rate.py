"""Search for the learning rate that lowers the loss most in a few optimizer steps.

    ask ──► short run ──► tell ──► … ──► run the best beside the default on other data ──► answer

Every run starts from the same weights and takes the batches that its seed draws, with the plan's batch, split
and precision. The learning rate is constant: a warm-up longer than the run would try every learning rate on
its ramp only. Runs are compared by the training loss, which is free: a batch is new to the model as long as
the run is shorter than an epoch.

The best of many noisy losses is too good to be true. So it runs again beside the default on batches that
other seeds draw. It replaces the default only if it is better every time, and on average beyond the noise
(Student's t, one-sided, 97.5 %). A gain is a share of the loss reduction, because a loss has no zero of its
own. The learning rate that lowers the loss most in a short run need not do so in a long one (Wu et al. 2018,
arXiv:1803.02021).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from autobatch.core.knobs import PRECISION
from autobatch.core.progress import SILENT, Progress
from autobatch.core.records import LrComparison, LrTrial, LrTuning, Plan
from autobatch.device.oom import first_line
from autobatch.rehearsal.process import ChildCrashed, Session, SetupProcess
from autobatch.rehearsal.rehearsal import Batch, Step, batch_of, rehearse
from autobatch.rehearsal.setup import with_knobs
from autobatch.tuning.compare import MINIMUM_GAIN, STUDENT
from autobatch.tuning.configuration import Budget, StudyLocation
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.rng import seed_everything
from autobatch.workload.split import Split

if TYPE_CHECKING:
    from autobatch.tuning.study import Study

RATE = "learning_rate"
REACH = 32.0
"""Learning rates are tried from the default ÷ this to the default × this."""
FIRST_FACTORS = (1.0, 4.0, 1 / 4, 16.0, 1 / 16)
"""First trials as multiples of the default: they cover the range before a model is fitted."""
PARTS = 4
"""The result of a run is the mean loss of the last of this many parts."""
DIVERGED = 2.0
"""A run has diverged if its last loss exceeds this multiple of its first."""
OTHER_SEEDS = 2
"""Number of further data orders that decide."""
EDGE_FACTOR = 1.5
"""Within this factor of a bound of the range, the best may lie beyond."""


class LrTrialSpec(NamedTuple):
    """Settings of short runs: plain values that can be sent to another process."""

    plan: Plan
    """What is trained; its learning rate is kept unless another is better."""
    steps: int
    """Optimizer steps of a run; at least `PARTS`."""
    skips: bool = False
    """True to skip a non-finite step, as the training that follows does."""


class LrTrialResult(NamedTuple):
    """The result of a short run."""

    rate: float
    loss: float | None
    """Of its last part; None if it ended earlier."""
    first: float | None
    """Of its first step, before any update; None if no loss was finite."""
    failure: str | None
    """Reason why it is infeasible, in one line; None if it is feasible."""


@dataclass(frozen=True)
class ShortRuns:
    """Short runs in the process that holds the setup. One that crashes a child makes its rate infeasible."""

    process: SetupProcess
    task: LrTrialSpec

    def __call__(self, rate: float, seed: int) -> LrTrialResult:
        """Train at a learning rate on the batches that a seed draws; see `short_run`."""
        try:
            return self.process.call("a trial of a learning rate", short_run, self.task, rate, seed)
        except ChildCrashed as crash:
            return LrTrialResult(rate, None, None, str(crash))


def find_learning_rate(
    run: ShortRuns,
    *,
    budget: Budget,
    seed: int,
    place: StudyLocation,
    progress: Progress = SILENT,
) -> LrTuning:
    """Find the learning rate after which the loss is lowest.

    Args:
        run: trains at a learning rate on the batches that a seed draws; the default is that of its plan.
        budget: trials and time.
        seed: of the trials' data and of the sampler; the same seed gives the same answer.
        place: the study.
        progress: receives every trial.

    Returns:
        The best learning rate; the default if none is better beyond the noise.

    Raises:
        InputError: the storage failed, or the study was made for something else.
        Exception: whatever the workload raises at the default learning rate.
    """
    # Only here: Optuna takes half a second to import.
    from autobatch.tuning.study import study_of_rates

    start, default, steps = time.monotonic(), run.task.plan.learning_rate, run.task.steps
    study = study_of_rates(place, RATE, default, FIRST_FACTORS, reach=REACH, seed=seed)
    tried = _tried(study)
    while len(tried) < budget.trials and not budget.expired():
        request = study.ask()
        progress.doing(f"learning rate {len(tried) + 1}: a run of {steps} steps")
        try:
            found = run(float(request.params[RATE]), seed)
        except BaseException:
            study.fail(request)
            raise
        stored = {name: value for name, value in found._asdict().items() if name != "rate"}
        is_feasible = found.failure is None
        study.tell(request, found.loss, stored, is_feasible=is_feasible, fallback=found.first or 0.0)
        tried = _tried(study)
        progress.tried_rate(len(tried), budget.trials, found.rate, found.loss, found.failure)
    known = next((one for one in tried if one.rate == default), None)
    trained = [one for one in tried if one.failure is None]
    best = min(trained, key=lambda one: math.inf if one.loss is None else one.loss, default=None)
    pairs: list[LrComparison] = []
    if known is not None and best is not None and best.rate != default:
        progress.doing(f"comparing {best.rate:.3g} with {default:.3g} on other data")
        pairs = list(_compare(run, known, best, seed))
    chosen = best if decide(pairs) else known
    return LrTuning(
        trials=len(tried),
        steps=steps,
        default=default,
        best=default if chosen is None else chosen.rate,
        default_loss=None if known is None else known.loss,
        best_loss=None if chosen is None else chosen.loss,
        study=study.name,
        history=[
            LrTrial(number=number, learning_rate=rate, loss=loss, feasible=failure is None, note=failure)
            for number, (rate, loss, _, failure) in enumerate(tried)
        ],
        pairs=pairs,
        sampler="tree-structured Parzen estimators",
        seconds=time.monotonic() - start,
        notes=_explain(default, tried, best, pairs),
    )


def _tried(study: Study) -> list[LrTrialResult]:
    """Return the results of all trials of a study."""
    found = [(trial.params[RATE], trial.user_attrs) for trial in study.trials("complete")]
    return [
        LrTrialResult(
            rate, stored.get("loss"), stored.get("first"), stored.get("failure", "no result was stored")
        )
        for rate, stored in found
    ]


def _compare(run: ShortRuns, known: LrTrialResult, best: LrTrialResult, seed: int) -> Iterator[LrComparison]:
    """Compare the default with the best on the study's data and on other data; each goes first in turn."""
    yield _comparison(seed, known, best)
    for number in range(1, OTHER_SEEDS + 1):
        other = (seed + number) % 2**31
        order = [known.rate, best.rate] if number % 2 else [best.rate, known.rate]
        found = {rate: run(rate, other) for rate in order}
        yield _comparison(other, found[known.rate], found[best.rate])


def _comparison(seed: int, default: LrTrialResult, other: LrTrialResult) -> LrComparison:
    """Return the comparison of two learning rates on the data of a seed."""
    return LrComparison(
        seed=seed, default_loss=default.loss, other_loss=other.loss, gain=gain_over(default, other)
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
    """Return the share of the loss reduction that a learning rate gains over the default, -1 at least.

    It is 1 if only the default does not train, and -1 if the other does not.
    """
    if other.failure is not None or other.loss is None or other.first is None or other.loss >= other.first:
        return -1.0
    if default.failure is not None or default.loss is None:
        return 1.0
    return max(-1.0, (default.loss - other.loss) / (other.first - other.loss))


def _explain(
    default: float,
    tried: Sequence[LrTrialResult],
    best: LrTrialResult | None,
    pairs: Sequence[LrComparison],
) -> list[str]:
    """Return notes for the user on the answer, one per line."""
    kept = f"kept learning rate {default:.3g}"
    known = next((one for one in tried if one.rate == default), None)
    if known is None:
        return [f"{kept}: its own trial was not run"]
    if best is None:
        return [f"{kept}: none of {len(tried)} learning rates trained. The default one: {known.failure}"]
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


def result_of(rate: float, steps: Sequence[tuple[float, float]], failure: str | None = None) -> LrTrialResult:
    """Return the result of a short run: the mean loss over the counted items of its last part.

    Args:
        rate: the learning rate.
        steps: mean loss of each step over its counted items, and their number.
        failure: why the run ended early, in one line; None if it did not.
    """
    begin = len(steps) * (PARTS - 1) // PARTS
    seen, last = (
        [(loss, items) for loss, items in part if items and math.isfinite(loss)]
        for part in (steps, steps[begin:])
    )
    first = seen[0][0] if seen else None
    if failure is not None:
        return LrTrialResult(rate, None, first, failure)
    if not last or first is None:
        return LrTrialResult(rate, None, first, "no loss was finite")
    loss = sum(loss * items for loss, items in last) / sum(items for _, items in last)
    if loss - first > (DIVERGED - 1) * abs(first):
        return LrTrialResult(rate, loss, first, f"diverged: the loss rose from {first:.4g} to {loss:.4g}")
    return LrTrialResult(rate, loss, first, None)


def short_run(session: Session, task: LrTrialSpec, rate: float, seed: int) -> LrTrialResult:
    """Train a few steps on temporary weights; the seed draws the batches and the model's random numbers.

    Raises:
        Exception: whatever the workload raises at the default learning rate, except out of memory.
    """
    plan = task.plan
    setup = with_knobs(session.setup, {**plan.knobs, PRECISION: plan.precision})
    samples, order = epoch_of(setup.workload, seed)
    sampler = GlobalBatchSampler(
        samples=samples, target_batch=plan.target_batch, seed=seed, steps=task.steps, order=order
    )
    split = Split(multiple=plan.multiple)

    def batches() -> Iterator[Batch]:
        seed_everything(seed)
        for batch in sampler.batches():
            yield batch_of(setup.workload, split.parts(batch, plan.micro_batch))

    def ends(step: Step) -> bool:
        """Return whether training would end here: a loss scale that is still falling skips such a step."""
        is_lost = bool(step.result.count) and not step.result.applied
        return is_lost and setup.precision != "fp16" and not task.skips

    try:
        found = rehearse(setup, batches(), learning_rate=rate, until=ends)
    except Exception as error:
        if rate == plan.learning_rate:
            raise
        failure = first_line(error)
    else:
        is_lost = found.failure is None and ends(found.steps[-1])
        reason = "its loss or gradient is not finite" if is_lost else None
        losses = [(step.result.loss, step.result.count) for step in found.steps]
        return result_of(rate, losses, reason if found.failure is None else found.failure.reason)
    # Outside the except block, nothing keeps the failed step's tensors alive.
    setup.device.release()
    return LrTrialResult(rate, None, None, failure)
