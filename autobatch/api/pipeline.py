"""The stages of each command, in order.

    workload ──► footprint ──► probe ──► plan ──► tune ──► train ──► report
                   (traced)    (run)    (exact)  (Optuna)  (loop)   (to read)

With an isolated `RunContext`, one child process opens the workload for the probe, the trials and the short
runs, and this process opens it once more for the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import msgspec

from autobatch.api import unpack
from autobatch.api.checks import note_split
from autobatch.api.confirm import Together, confirmed_plan
from autobatch.api.context import RunContext
from autobatch.api.one_size import one_size_if_asked
from autobatch.api.over_ranks import agree_on_fit
from autobatch.api.split import add_split
from autobatch.api.tune_stage import add_learning_rate, add_tuning, check_storage_option, open_tuner
from autobatch.core.errors import InputError
from autobatch.core.files import write_output
from autobatch.core.options import (
    EstimateOptions,
    PlanOptions,
    ProbeOptions,
    RankPlanOptions,
    SearchOptions,
    TuneOptions,
)
from autobatch.core.progress import Progress
from autobatch.device.profiles import data_home
from autobatch.distributed.launch import check_equal
from autobatch.distributed.ranks import refuse_ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import rank_share
from autobatch.probing.child import SetupProcess, open_process
from autobatch.probing.estimate import estimate_limits
from autobatch.probing.estimate_ranks import estimate_over_ranks
from autobatch.probing.find_limit import Limit, check_size, find_limit
from autobatch.probing.limits_by_size import find_limits_by_size
from autobatch.probing.real_batches import Order
from autobatch.probing.setup import find_workload
from autobatch.probing.step_snapshot import step_snapshot
from autobatch.probing.survive import survive_real_batches
from autobatch.probing.traced_setup import predicted_memory
from autobatch.report.result import Estimates, Result
from autobatch.workload.contract import Workload

OPENING = "opening the workload"
PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""


def run_probe(workload: Workload | str | None, options: ProbeOptions, context: RunContext) -> Result:
    """Run ``autobatch probe``."""
    refuse_ranks(context.environ, "probe")
    limits, progress = unpack.probe_limits(options), context.progress
    progress.doing(OPENING)
    settings = unpack.setup_settings(options)
    with open_process(workload, settings, isolated=context.isolated, spare=context.spare) as process:
        device = process.info.device
        if options.micro_batch is not None:
            found = check_size(process, options.micro_batch, progress=progress)
            result = Result(device=device, probe=found, command=context.command)
            write_memory_viz(process, result, options, progress)
            note_split(process, result, progress)
            return result
        limit = find_limit(process, limits, home=context.home, progress=progress, clock=context.clock)
        limit = survive_real_batches(
            process, limit, Order(None, options.seed), home=context.home, progress=progress
        )
        found = find_limits_by_size(process, limits, limit.probe, home=context.home, progress=progress)
        result = Result(device=device, probe=found, profile=limit.file, command=context.command)
        write_memory_viz(process, result, options, progress)
        note_split(process, result, progress)
        return result


def run_plan(workload: Workload | str | None, options: RankPlanOptions, context: RunContext) -> Result:
    """Run ``autobatch plan``. An interrupted probe answers with the largest size so far."""
    world_size = unpack.world_size_of(options, context.environ)
    with open_setup_process(workload, options, context, keeps_batches=options.own_loop) as process:
        result = probe_and_plan(process, options, context, world_size=world_size)
        write_memory_viz(process, result, options, context.progress)
        note_split(process, result, context.progress)
        return add_split(process, result, options, context.progress, home=context.home, is_last=True)


def run_estimate(
    workload: Workload | str | None, options: EstimateOptions, environ: Mapping[str, str]
) -> Estimates:
    """Run ``autobatch estimate``.

    Raises:
        InputError: the page cannot be written.
    """
    made, settings = find_workload(workload), unpack.estimate_settings(options)
    if options.all:
        settings = replace(settings, profiles=(), device="auto")
    ranks, home = unpack.rank_settings(options), data_home(environ)
    if ranks is not None and options.memory_viz is not None:
        raise InputError(
            f"--memory-viz {options.memory_viz} shows one GPU, found --ranks {options.ranks}: leave one out"
        )
    found = (
        estimate_limits(made, settings, home=home)
        if ranks is None
        else estimate_over_ranks(made, settings, ranks, home=home)
    )
    if options.report is None:
        return found
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.estimate_page import estimate_page

    page = estimate_page(found, made.name)
    path = write_output(Path(options.report), page.encode(), "--report")
    return msgspec.structs.replace(found, notes=[*found.notes, f"the page is {path}"])


def run_tune(workload: Workload | str | None, options: TuneOptions, context: RunContext) -> Result:
    """Run ``autobatch tune``."""
    refuse_ranks(context.environ, "tune")
    check_storage_option(options)
    with open_setup_process(workload, options, context) as process:
        result = uninterrupted(probe_and_plan(process, options, context))
        note_split(process, result, context.progress, is_last=False)
        settings = unpack.tune_settings(options, process.info, PLANNED_STEPS)
        tuner = open_tuner(process, settings, context, options.timeout)
        if settings.trials or not options.tune_lr:
            result = add_tuning(tuner, result, options)
        write_memory_viz(process, result, options, context.progress)
        result = add_split(process, result, options, context.progress, home=context.home)
        if not options.tune_lr:
            return result
        try:
            return add_learning_rate(tuner, result)
        except KeyboardInterrupt:
            # The result so far is complete, and the next call continues the study.
            context.progress.note("interrupted: kept the learning rate")
            return result


def open_setup_process(
    workload: Workload | str | None,
    options: PlanOptions,
    context: RunContext,
    shard: ShardLayout | None = None,
    *,
    keeps_batches: bool = False,
    may_share: bool = False,
) -> AbstractContextManager[SetupProcess]:
    """Open the setup of a batch in a process that can be asked to try it.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        shard: the way in which ranks share the model; None if each has a whole one.
        keeps_batches: whether the loop keeps each micro-batch until the next one is there.
        may_share: whether ranks may share a model that is too large for one of them.
    """
    ranks = context.ranks
    settings = unpack.setup_settings(
        options,
        options.target_batch,
        world=ranks.world,
        shard=shard,
        holds_model=ranks.rank == 0,
        keeps_batches=keeps_batches,
    )
    settings = replace(settings, may_share=may_share)
    context.progress.doing(OPENING)
    return open_process(workload, settings, isolated=context.isolated, spare=context.spare)


def probe_and_plan(
    process: SetupProcess,
    options: PlanOptions,
    context: RunContext,
    *,
    world_size: int = 1,
    together: Together = Together(),  # noqa: B008 - plain values
) -> Result:
    """Find the largest micro-batch and plan the batch, also after an interrupted probe.

    Args:
        process: holds the setup.
        options: options of the command.
        context: surroundings of the call.
        world_size: data-parallel ranks that share a batch.
        together: how the ranks of a run train together.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
        DoesNotFitError: not even a micro-batch of 1 fits. All ranks raise it if they may share the model.
    """
    info, progress = process.info, context.progress
    # An invalid plan must fail before minutes are spent on a probe.
    unpack.plan_for(info, 1, options, world_size)
    limits = unpack.probe_limits(options, rank_share(options.target_batch, world_size, 0))

    def probe() -> Limit:
        return find_limit(process, limits, home=context.home, progress=progress, clock=context.clock)

    limit = agree_on_fit(probe, context.ranks) if together.may_share else probe()
    order = Order(rank_share(options.target_batch, world_size, 0), options.seed)
    limit = survive_real_batches(process, limit, order, home=context.home, progress=progress)
    # Of a stream, this is what the plan looked at, and rank 0 reads it for all.
    samples = None if info.epoch_samples is None else info.samples
    check_equal(context.ranks.gather({"the model": info.key.get("model"), "the data": samples}))
    plan, joint = confirmed_plan(
        process,
        lambda size: unpack.plan_for(info, size, options, world_size),
        limit.probe.micro_batch,
        together,
        context.ranks,
        progress,
    )
    plan = one_size_if_asked(plan, limit.probe.micro_batch, options, progress)
    progress.planned(plan)
    if plan.learning_rate_rule == "none" and plan.base_batch not in (None, plan.target_batch):
        progress.note(f"learning rate {plan.learning_rate:g}: {plan.learning_rate_source}")
    progress.doing("predicting the memory of a step")
    predicted, curve = predicted_memory(limit.footprint, info, limit.probe.micro_batch)
    return Result(
        device=info.device,
        probe=msgspec.structs.replace(limit.probe, over_ranks=joint),
        plan=plan,
        profile=limit.file,
        title=info.name,
        command=context.command,
        predicted=predicted,
        memory_curve=curve,
    )


def write_memory_viz(
    process: SetupProcess, result: Result, options: SearchOptions, progress: Progress
) -> None:
    """Write the memory of a few steps of the result to ``--memory-viz``, if it was asked for.

    Raises:
        InputError: the file cannot be written.
    """
    probe, plan = result.probe, result.plan
    if options.memory_viz is None or probe is None or probe.micro_batch < 1:
        return
    progress.doing("recording the memory of a few steps")
    content = step_snapshot(
        process, probe.micro_batch if plan is None else plan.micro_batch, {} if plan is None else plan.knobs
    )
    if content is None:
        progress.note("--memory-viz: nothing was written, because the steps gave no record of their memory")
        return
    path = write_output(Path(options.memory_viz), content, "--memory-viz")
    progress.note(f"the memory of a few steps is in {path}: open it at pytorch.org/memory_viz")


def uninterrupted(result: Result) -> Result:
    """Return a result, or raise if its probe was interrupted, which ends the later stages too.

    Raises:
        KeyboardInterrupt: the probe was interrupted.
    """
    if result.probe is not None and result.probe.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return result
