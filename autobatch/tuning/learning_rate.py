"""Study of the learning rate: the one after which a few optimizer steps leave the lowest loss.

Every run starts from the same weights and takes the batches that its seed draws, with the plan's batch, split
and precision, at a constant rate: a warm-up longer than the run would try every rate on its ramp only. The
best of many noisy losses is too good to be true. So it runs again beside the default on other data orders,
and is chosen only if it is better on all of five: one that is no better is so in one of 32 cases. The best
rate of a short run need not be that of a long one (Wu et al. 2018, arXiv:1803.02021).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec.structs import replace
from optuna.distributions import FloatDistribution

from autobatch.core.errors import Infeasible
from autobatch.core.records import PRECISION, LrTrial, LrTuning, Plan
from autobatch.tuning.fastest import Tuner
from autobatch.tuning.study import open_study, run_trials, tried
from autobatch.tuning.trial import call_with, short_run

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
    if tuning.best != plan.learning_rate:
        plan = replace(
            plan,
            learning_rate=tuning.best,
            learning_rate_rule="tuned",
            learning_rate_factor=tuning.best / tuner.process.info.learning_rate,
            learning_rate_source=f"tuned in {tuning.trials} runs of {STEPS} optimizer steps at this batch",
        )
    return plan, tuning


def _find_rate(tuner: Tuner, plan: Plan) -> LrTuning:
    """Return the best learning rate; the default if none is better beyond the noise."""
    default, seed = plan.learning_rate, tuner.options.seed
    knobs = {**plan.knobs, PRECISION: plan.precision}

    def loss_at(rate: float, order: int = 0) -> Any:
        run = replace(plan, learning_rate=rate), (seed + order) % 2**31, STEPS
        return call_with(tuner.process, short_run, knobs, rate == default, *run)

    def objective(number: int, values: dict[str, float]) -> tuple[float | None, LrTrial]:
        tuner.progress.doing(f"learning rate {number + 1} of {RATES}: a run of {STEPS} steps")
        trial = LrTrial(number=number, learning_rate=values["learning_rate"])
        try:
            trial = replace(trial, loss=loss_at(trial.learning_rate))
        except Infeasible as reason:
            trial = replace(trial, note=str(reason))
        tuner.progress.tried_rate(trial, RATES)
        return trial.loss, trial

    purpose = ("learning rate", default, STEPS, seed)
    study = open_study(tuner.process.info, tuner.options, tuner.home, "minimize", *purpose)
    space = {"learning_rate": FloatDistribution(default / REACH, default * REACH, log=True)}
    first = [{"learning_rate": default * factor} for factor in FACTORS]
    run_trials(study, objective, space=space, first=lambda: first, trials=RATES, deadline=tuner.deadline)
    history = tried(study, LrTrial)
    losses = {trial.learning_rate: trial.loss for trial in history if trial.loss is not None}
    best = min(losses, key=losses.__getitem__, default=default)
    notes, is_kept = [], best != default
    with suppress(Infeasible):
        is_kept = is_kept and not all(loss_at(default, at) > loss_at(best, at) for at in ORDERS)
    if is_kept:
        notes = [f"kept learning rate {default:.3g}: {best:.3g} was not better on every data order"]
        best = default
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
