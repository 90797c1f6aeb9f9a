"""Study of the learning rate: the one after which a few optimizer steps leave the lowest loss.

Every run starts from the same weights and takes the batches that its seed draws, with the plan's batch, split
and precision, at a constant rate: a warm-up longer than the run would try every rate on its ramp only. The
best of many noisy losses is too good to be true. So it runs again beside the default on other data orders,
and is chosen only if it is better on all of five: one that is no better is so in one of 32 cases. The best
rate of a short run need not be that of a long one (Wu et al. 2018, arXiv:1803.02021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace
from optuna.distributions import FloatDistribution

from autobatch.core.errors import Infeasible
from autobatch.core.knobs import PRECISION
from autobatch.core.records import LrTrial, LrTuning, Plan
from autobatch.rehearsal.rehearsal import Batch, batch_of, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.tuning.fastest import Tuner
from autobatch.tuning.study import open_study, run_trials, tried
from autobatch.tuning.trial import call_with, draw
from autobatch.workload.rng import seed_everything
from autobatch.workload.split import Split

FACTORS = (1.0, 4.0, 1 / 4, 16.0, 1 / 16)
"""First rates that are tried, as multiples of the default."""
RATES, REACH = 10, 32.0
"""Number of rates that are tried, from the default ÷ 32 to the default × 32."""
STEPS = 40
"""Optimizer steps of a run, of which the last quarter counts."""
ORDERS = range(1, 6)
"""Other data orders, on each of which the best rate must be better."""


def tune_learning_rate(tuner: Tuner, plan: Plan) -> tuple[Plan, LrTuning]:
    """Try learning rates in short runs of a plan, and put a better one into the plan.

    A run trains whole batches in one process, so that rank 0 is enough.

    Raises:
        AutobatchError: the file of the study failed.
        Exception: whatever the workload raises at its own learning rate, except out of memory.
    """
    tuning = tuner.ranks.once(lambda: _find_rate(tuner, plan))
    for line in tuning.notes:
        tuner.progress.note(line)
    if tuning.best == plan.learning_rate:
        return plan, tuning
    plan = replace(
        plan,
        learning_rate=tuning.best,
        learning_rate_rule="tuned",
        learning_rate_factor=tuning.best / tuner.process.info.learning_rate,
        learning_rate_source=f"tuned in {tuning.trials} runs of {STEPS} optimizer steps at this batch",
    )
    tuner.progress.planned(plan)
    return plan, tuning


def _find_rate(tuner: Tuner, plan: Plan) -> LrTuning:
    """Return the best learning rate; the default if none is better beyond the noise."""
    default, first_seed, progress = plan.learning_rate, tuner.options.seed, tuner.progress

    def run(rate: float, number: int = 0, order: int = 0) -> LrTrial:
        knobs, at_rate = {**plan.knobs, PRECISION: plan.precision}, replace(plan, learning_rate=rate)
        seed, loss, note = (first_seed + order) % 2**31, None, None
        try:
            loss = call_with(tuner.process, short_run, knobs, rate == default, at_rate, seed, STEPS)
        except Infeasible as reason:
            note = str(reason)
        return LrTrial(number=number, learning_rate=rate, loss=loss, note=note)

    def objective(number: int, values: dict[str, float]) -> tuple[float | None, LrTrial]:
        progress.doing(f"learning rate {number + 1} of {RATES}: a run of {STEPS} steps")
        trial = run(values["learning_rate"], number)
        progress.tried_rate(number + 1, RATES, trial.learning_rate, trial.loss, trial.note)
        return trial.loss, trial

    def is_better(rate: float, order: int) -> bool:
        usual, other = run(default, order=order).loss, run(rate, order=order).loss
        return usual is not None and other is not None and other < usual

    purpose = ("learning rate", default, STEPS, first_seed)
    study = open_study(tuner.process.info, tuner.options, tuner.home, "minimize", *purpose)
    rates = FloatDistribution(default / REACH, default * REACH, log=True)
    first = [{"learning_rate": default * factor} for factor in FACTORS]
    space, deadline = {"learning_rate": rates}, tuner.deadline
    run_trials(study, objective, space=space, first=lambda: first, trials=RATES, deadline=deadline)
    history = tried(study, LrTrial)
    losses = {trial.learning_rate: trial.loss for trial in history if trial.loss is not None}
    best, notes = min(losses, key=losses.__getitem__, default=default), []
    if best != default and not all(is_better(best, order) for order in ORDERS):
        reason = f"{best:.3g} was not better on each of {len(ORDERS)} data orders"
        best, notes = default, [f"kept learning rate {default:.3g}: {reason}"]
    return LrTuning(
        trials=len(history),
        steps=STEPS,
        default=default,
        best=best,
        default_loss=losses.get(default),
        best_loss=losses.get(best),
        history=history,
        notes=notes,
    )


def short_run(setup: Setup, plan: Plan, seed: int, steps: int) -> float:
    """Train a few steps of a plan on temporary weights, and return the mean loss of the last quarter of them.

    The seed draws the batches and the model's random numbers.

    Raises:
        Infeasible: the run does not train.
        Exception: whatever the workload raises, except out of memory.
    """

    def batches() -> Iterator[Batch]:
        seed_everything(seed)
        for batch in draw(setup.workload, plan.target_batch, seed, steps).batches():
            yield batch_of(setup.workload, Split(multiple=plan.multiple).parts(batch, plan.micro_batch))

    run = rehearse(setup, batches(), learning_rate=plan.learning_rate)
    if run.failure is not None:
        raise Infeasible(run.failure.reason)
    results = [step.result for step in run.steps if step.result.count]
    last = [result for result in results[-len(results) // 4 :] if math.isfinite(result.loss)]
    # A loss scale that is still falling skips the first steps of a sound run in fp16.
    if not last or not all(result.applied for result in results[-1 if setup.precision == "fp16" else 0 :]):
        raise Infeasible("its loss or gradient is not finite")
    return sum(result.loss * result.count for result in last) / sum(result.count for result in last)
