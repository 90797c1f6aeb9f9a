"""The stages of tuning: the fastest configuration of a plan, and its learning rate."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from autobatch.api.context import RunContext
from autobatch.core.options import Options
from autobatch.core.records.tuning import Tuning
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.report.result import Result
from autobatch.setup.child import SetupProcess
from autobatch.tuning.tune_plan import PlanTuner


def open_tuner(
    process: SetupProcess,
    options: Options,
    planned_steps: int,
    context: RunContext,
    shard: ShardLayout | None,
) -> PlanTuner:
    """Return the tuner of a plan, whose time starts now; it tries nothing of a model that ranks share.

    Args:
        process: holds the setup.
        options: options of the command.
        planned_steps: optimizer steps of the run that is tuned for.
        context: surroundings of the call.
        shard: the layout of a shared model; None if each rank has a whole one.
    """
    tuner = PlanTuner(
        process=process,
        options=options,
        planned_steps=planned_steps,
        home=context.home,
        progress=context.progress,
        ranks=context.ranks,
        expired=context.expiry(options.tune.timeout),
        clock=context.clock,
    )
    asked = {"configuration": tuner.trials, "learning rate": tuner.lr_trials}
    left_out = " and the ".join(name for name, trials in asked.items() if trials)
    if shard is None or not left_out:
        return tuner
    verb = "are" if all(asked.values()) else "is"
    context.progress.note(f"the {left_out} {verb} not tuned, because the ranks share the model")
    return replace(tuner, options=options.with_values(trials=0, tune_lr=False))


def add_tuning(tuner: PlanTuner, result: Result) -> Result:
    """Put the fastest configuration into a result."""
    assert result.plan is not None
    assert result.probe is not None
    plan, tuning = tuner.tune(result.plan, result.probe.micro_batch)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def add_learning_rate(tuner: PlanTuner, result: Result) -> Result:
    """Put the best learning rate into a result, beside the trials if there were any."""
    assert result.plan is not None
    plan, found = tuner.tune_learning_rate(result.plan)
    nothing = Tuning(trials=0, best={}, baseline_samples_per_s=0.0, best_samples_per_s=0.0, study="")
    tuning = msgspec.structs.replace(result.tuning or nothing, learning_rate=found)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def check_storage_option(options: Options) -> None:
    """Check that a requested storage is usable, before minutes are spent on a probe.

    Raises:
        InputError: it is not.
    """
    if options.tune.storage is not None and (options.tune.trials != 0 or options.tune.tune_lr):
        # Only here: Optuna takes half a second to import.
        from autobatch.tuning.study import check_storage

        check_storage(options.tune.storage)
