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
from typing import Any, NamedTuple

import msgspec
from optuna.distributions import FloatDistribution

from autobatch.core.knobs import PRECISION
from autobatch.core.records import LrTrial, LrTuning, Plan
from autobatch.rehearsal.rehearsal import Batch, Step, batch_of, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.tuning.compare import Infeasible
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


class ShortRun(NamedTuple):
    """A run: plain values that can be sent to another process."""

    plan: Plan
    """Has the batch and its split."""
    rate: float
    seed: int
    """Draws the batches and the model's random numbers."""
    steps: int
    """Optimizer steps."""
    skips: bool = False
    """True to skip a step whose loss or gradient is not finite, as the training that follows does."""


def tune_learning_rate(tuner: Tuner, plan: Plan) -> tuple[Plan, LrTuning]:
    """Try learning rates in short runs of a plan, and put a better one into the plan.

    A run trains whole batches in one process, so that rank 0 is enough.

    Raises:
        AutobatchError: the storage failed.
        Exception: whatever the workload raises at its own learning rate, except out of memory.
    """
    found = tuner.ranks.once(lambda: _find_rate(tuner, plan))
    for line in found.notes:
        tuner.progress.note(line)
    if found.best == plan.learning_rate:
        return plan, found
    plan = msgspec.structs.replace(
        plan,
        learning_rate=found.best,
        learning_rate_rule="tuned",
        learning_rate_factor=found.best / tuner.process.info.learning_rate,
        learning_rate_source=f"tuned in {found.trials} runs of {found.steps} optimizer steps at this batch",
    )
    tuner.progress.planned(plan)
    return plan, found


def _find_rate(tuner: Tuner, plan: Plan) -> LrTuning:
    """Return the best learning rate; the default if none is better beyond the noise."""
    default, seed, progress = plan.learning_rate, tuner.options.device.seed, tuner.progress
    skips = tuner.options.train.on_nonfinite == "skip"
    knobs = {**plan.knobs, PRECISION: plan.precision}

    def loss_of(rate: float, seed: int) -> float:
        run = ShortRun(plan, rate, seed, STEPS, skips)
        act = "a trial of a learning rate"
        return call_with(tuner.process, act, short_run, knobs, rate == default, run)  # type: ignore[no-any-return]

    def objective(point: Point) -> tuple[float | None, dict[str, Any]]:
        number, rate, loss, reason = len(study.tried()), point[RATE], None, None
        progress.doing(f"learning rate {number + 1} of {RATES}: a run of {STEPS} steps")
        try:
            loss = loss_of(rate, seed)
        except Infeasible as infeasible:
            reason = str(infeasible)
        progress.tried_rate(number + 1, RATES, rate, loss, reason)
        return loss, {"number": number, "learning_rate": rate, "loss": loss, "note": reason}

    space = {RATE: FloatDistribution(default / REACH, default * REACH, log=True)}
    made_for = {"samples": tuner.process.info.samples, "rate": default, "steps": STEPS, "seed": seed}
    study = tuner.open_study(space, made_for, direction="minimize", metric="loss", suffix="-learning-rate")
    study.run(objective, lambda: [{RATE: default * factor} for factor in FACTORS], RATES, tuner.expired)
    tried = [msgspec.convert(facts, LrTrial) for facts in study.tried()]
    losses = {trial.learning_rate: trial.loss for trial in tried if trial.loss is not None}
    best = min(losses, key=losses.__getitem__, default=default)
    won = 0
    while best != default and default in losses and won < ORDERS:
        progress.doing(f"learning rate {best:.3g} beside {default:.3g}, data order {won + 1} of {ORDERS}")
        try:
            # Each goes first in turn.
            rates = [default, best][:: -1 if won % 2 else 1]
            found = {rate: loss_of(rate, (seed + won + 1) % 2**31) for rate in rates}
        except Infeasible:
            break
        if found[best] >= found[default]:
            break
        won += 1
    chosen = best if won == ORDERS else default
    notes = []
    if chosen != best:
        notes.append(
            f"kept learning rate {default:.3g}: {best:.3g} was better on {won} further data orders, and must "
            f"be on {ORDERS}"
        )
    return LrTuning(
        trials=len(tried),
        steps=STEPS,
        default=default,
        best=chosen,
        default_loss=losses.get(default),
        best_loss=losses.get(chosen),
        study=study.name,
        history=tried,
        notes=notes,
    )


def short_run(setup: Setup, run: ShortRun) -> float:
    """Train a few steps on temporary weights, and return the mean loss of the last quarter of them.

    Raises:
        Infeasible: the run does not train.
        Exception: whatever the workload raises, except out of memory.
    """
    plan, split = run.plan, Split(multiple=run.plan.multiple)

    def batches() -> Iterator[Batch]:
        seed_everything(run.seed)
        for batch in draw(setup.workload, plan.target_batch, run.seed, run.steps).batches():
            yield batch_of(setup.workload, split.parts(batch, plan.micro_batch))

    def is_lost(step: Step) -> bool:
        """Return whether training would end here: a loss scale that is still falling skips such a step."""
        was_skipped = bool(step.result.count) and not step.result.applied
        return was_skipped and setup.precision != "fp16" and not run.skips

    found = rehearse(setup, batches(), learning_rate=run.rate, until=is_lost)
    if found.failure is not None:
        raise Infeasible(found.failure.reason)
    last = [step.result for step in found.steps[run.steps * 3 // 4 :]]
    counted = [(result.loss, result.count) for result in last if result.count and math.isfinite(result.loss)]
    if is_lost(found.steps[-1]) or not counted:
        raise Infeasible("its loss or gradient is not finite")
    return sum(loss * count for loss, count in counted) / sum(count for _, count in counted)
