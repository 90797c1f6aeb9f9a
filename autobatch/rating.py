"""The stage of the learning rate, which comes last before training; and ``tune``, which ends with it."""

from __future__ import annotations

import hashlib

import msgspec

from autobatch.attempt import Bench
from autobatch.bench import Facts
from autobatch.config import FitOptions, TuneOptions
from autobatch.records import Plan, RateTuning, Tuning
from autobatch.results import Result
from autobatch.stages import (
    Environment,
    bench_opener,
    check_storage,
    plan_only,
    purpose_of,
    storage_of,
    tuned,
)
from autobatch.tuning.rates import tune_rate
from autobatch.tuning.runs import open_runs
from autobatch.tuning.shortrun import RunTask
from autobatch.tuning.tuner import Budget, Place
from autobatch.workload import Workload

SUFFIX = "-learning-rate"


def run_tune_command(
    workload: Workload | str | None, options: TuneOptions, environment: Environment
) -> Result:
    """``autobatch tune``."""
    check_storage(options)
    result, facts = plan_only(workload, options, environment)
    start = environment.clock()
    if options.trials or not options.tune_lr:
        result = tuned(result, facts, workload, options, environment)
    if not options.tune_lr:
        return result
    try:
        return rate_tuned(result, facts, workload, options, environment, since=start)
    except KeyboardInterrupt:
        # What was found before is whole; the study goes on with the next call.
        environment.progress.note("interrupted: the learning rate stays as it was")
        return result


def rate_tuned(
    result: Result,
    facts: Facts,
    workload: Workload | str | None,
    options: TuneOptions,
    environment: Environment,
    *,
    since: float,
    bench: Bench | None = None,
) -> Result:
    """Try learning rates with the plan as it stands, and put one that is better into it.

    Args:
        result: with a plan, and with what the tuner found, where it ran.
        facts: what they rest on.
        workload: the workload, or a reference to it.
        options: of the command.
        environment: what surrounds the call.
        since: when tuning began, by the environment's clock.
        bench: where short runs train in this process; opened here if there is none.

    Raises:
        InputError: the storage cannot be used, or the study was made for something else.
        AutobatchError: the workload cannot be trained at its own learning rate.
    """
    plan, progress = result.plan, environment.progress
    assert plan is not None
    task = RunTask(
        default=plan.learning_rate,
        target_batch=plan.target_batch,
        micro_batch=plan.micro_batch,
        precision=plan.precision,
        knobs=plan.knobs,
        steps=options.lr_steps,
        skips=isinstance(options, FitOptions) and options.on_nonfinite == "skip",
    )
    named = None if isinstance(workload, Workload) else workload
    isolated = environment.isolates(workload)
    open_it = bench_opener(workload, options, bench)
    with open_runs(named, options, task, bench=open_it, isolated=isolated) as runs:
        found = tune_rate(
            runs,
            task,
            budget=Budget(options.lr_trials, environment.has_passed(options.timeout, since)),
            seed=options.seed,
            place=_place(facts, options, task, environment),
            progress=lambda number, rate, loss, failure: progress.tried_rate(
                number, options.lr_trials, rate, loss, failure
            ),
            clock=environment.clock,
        )
    for line in found.notes:
        progress.note(line)
    planned = with_rate(plan, found, declared=facts.learning_rate)
    if planned != plan:
        progress.planned(planned)
    before = result.tuning or Tuning(
        trials=0, best={}, baseline_samples_per_s=0.0, best_samples_per_s=0.0, study=""
    )
    tuning = msgspec.structs.replace(before, learning_rate=found)
    return msgspec.structs.replace(result, tuning=tuning, plan=planned)


def with_rate(plan: Plan, found: RateTuning, *, declared: float) -> Plan:
    """The plan with the learning rate that was found; as it is, where the default stays."""
    if found.best == plan.learning_rate:
        return plan
    return msgspec.structs.replace(
        plan,
        learning_rate=found.best,
        learning_rate_rule="tuned",
        learning_rate_factor=found.best / declared,
        learning_rate_source=(
            f"found by the tuner: {found.trials} runs of {found.steps} optimizer steps at this batch"
        ),
    )


def _place(facts: Facts, options: TuneOptions, task: RunTask, environment: Environment) -> Place:
    """The study, beside the tuner's own; figures do not depend on what the tuner chose, but for rounding."""
    made_for = purpose_of(facts, options) | {
        "train_samples": facts.samples,
        "learning_rate": task.default,
        "lr_steps": task.steps,
        "seed": options.seed,
    }
    digest = hashlib.sha256(msgspec.json.encode(made_for, order="deterministic")).hexdigest()[:12]
    name = f"{options.study or f'{facts.name}-{digest}'}{SUFFIX}"
    return Place(name, storage_of(options, name, environment), made_for)
