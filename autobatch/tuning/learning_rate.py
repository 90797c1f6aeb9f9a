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
from typing import Any

import msgspec
from optuna.distributions import FloatDistribution

from autobatch.core.errors import Infeasible
from autobatch.core.knobs import PRECISION
from autobatch.core.records import LrTrial, LrTuning, Plan
from autobatch.rehearsal.rehearsal import Batch, batch_of, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.tuning.fastest import Tuner
from autobatch.tuning.study import Point
from autobatch.tuning.trial import call_with, draw
from autobatch.workload.rng import seed_everything
from autobatch.workload.split import Split

RATE = "learning_rate"
FACTORS = (1.0, 4.0, 1 / 4, 16.0, 1 / 16)
"""First rates that are tried, as multiples of the default."""
REACH = 32.0
"""Rates are tried from the default ÷ this to the default × this."""
RATES = 10
"""Rates that are tried."""
STEPS = 40
"""Optimizer steps of a run, of which the last quarter counts."""
ORDERS = 5
"""Other data orders on which the best rate must be better."""


def tune_learning_rate(tuner: Tuner, plan: Plan) -> tuple[Plan, LrTuning]:
    """Try learning rates in short runs of a plan, and put a better one into the plan.

    A run trains whole batches in one process, so that rank 0 is enough.

    Raises:
        AutobatchError: the storage failed.
        Exception: whatever the workload raises at its own learning rate, except out of memory.
    """
    tuning = tuner.ranks.once(lambda: _find_rate(tuner, plan))
    for line in tuning.notes:
        tuner.progress.note(line)
    if tuning.best == plan.learning_rate:
        return plan, tuning
    plan = msgspec.structs.replace(
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
    default, first_seed, progress = plan.learning_rate, tuner.options.device.seed, tuner.progress
    knobs = {**plan.knobs, PRECISION: plan.precision}

    def loss_of(rate: float, order: int = 0) -> float:
        at_rate, seed = msgspec.structs.replace(plan, learning_rate=rate), (first_seed + order) % 2**31
        run = (short_run, knobs, rate == default, at_rate, seed, STEPS)
        return call_with(tuner.process, "a trial of a learning rate", *run)  # type: ignore[no-any-return]

    def objective(point: Point) -> tuple[float | None, dict[str, Any]]:
        number, rate, loss, reason = len(study.tried()), point[RATE], None, None
        progress.doing(f"learning rate {number + 1} of {RATES}: a run of {STEPS} steps")
        try:
            loss = loss_of(rate)
        except Infeasible as infeasible:
            reason = str(infeasible)
        progress.tried_rate(number + 1, RATES, rate, loss, reason)
        return loss, {"number": number, "learning_rate": rate, "loss": loss, "note": reason}

    def is_better(rate: float, order: int) -> bool:
        progress.doing(f"learning rate {rate:.3g} beside {default:.3g}, data order {order} of {ORDERS}")
        try:
            return loss_of(default, order) > loss_of(rate, order)
        except Infeasible:
            return False

    space = {RATE: FloatDistribution(default / REACH, default * REACH, log=True)}
    made_for = {"samples": tuner.process.info.samples, "rate": default, "steps": STEPS, "seed": first_seed}
    study = tuner.open_study(space, made_for, direction="minimize", metric="loss", suffix="-learning-rate")
    study.run(objective, lambda: [{RATE: default * factor} for factor in FACTORS], RATES, tuner.expired)
    tried = [msgspec.convert(facts, LrTrial) for facts in study.tried()]
    losses = {trial.learning_rate: trial.loss for trial in tried if trial.loss is not None}
    best, notes = min(losses, key=losses.__getitem__, default=default), []
    if best != default and not all(is_better(best, order + 1) for order in range(ORDERS)):
        reason = f"{best:.3g} was not better on each of {ORDERS} data orders"
        best, notes = default, [f"kept learning rate {default:.3g}: {reason}"]
    fields: dict[str, Any] = {"trials": len(tried), "steps": STEPS, "study": study.name, "history": tried}
    fields |= {"default_loss": losses.get(default), "best_loss": losses.get(best), "notes": notes}
    return LrTuning(default=default, best=best, **fields)


def short_run(setup: Setup, plan: Plan, seed: int, steps: int) -> float:
    """Train a few steps of a plan on temporary weights, and return the mean loss of the last quarter of them.

    Args:
        setup: the model and the data.
        plan: has the batch, its split and the learning rate.
        seed: draws the batches and the model's random numbers.
        steps: optimizer steps.

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
    # A loss scale that is still falling skips the first steps of a sound run in fp16.
    judged = results[-1:] if setup.precision == "fp16" else results
    last = [result for result in results[-len(results) // 4 :] if math.isfinite(result.loss)]
    if not last or not all(result.applied for result in judged):
        raise Infeasible("its loss or gradient is not finite")
    return sum(result.loss * result.count for result in last) / sum(result.count for result in last)
