"""The stages of the pipeline before the training: open, search, plan, check, tune and split.

Each runs in the process that holds the setup. Over several ranks, all of them run the same stages, each in
its own process, and agree where one of them decides for all.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.api.context import RunContext
from autobatch.api.ranks import WholeModelTooLargeError, agree_on_fit, check_data_of_ranks
from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.files import write_atomic
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe, RankLimit, RunOrder, Tuning
from autobatch.distributed.rank_plan import agree_on_cut, limits_over_ranks, spread
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ONCE, ShardLayout
from autobatch.planning import launched_world_size, make_plan, micro_batches, rank_share
from autobatch.report.facts import describe_run_order
from autobatch.report.result import Result
from autobatch.report.words import decimal, plural
from autobatch.search.find_limit import check_size, find_limit
from autobatch.search.one_probe import Limit
from autobatch.search.planned_sizes import limit_of_plan
from autobatch.search.questions import ask_or_none
from autobatch.search.sizes.limits_by_size import find_limits_by_size
from autobatch.search.sizes.plan_split import SplitChoice, SplitSettings, choose_split, read_sizes
from autobatch.search.sizes.real_batches import Order
from autobatch.search.sizes.run_order import find_in_order
from autobatch.search.sizes.survive import survive_real_batches
from autobatch.search.step_snapshot import step_snapshot
from autobatch.setup.child import ChildCrashed, SetupProcess, open_process
from autobatch.setup.setup import Role, SetupInfo
from autobatch.setup.trace import predicted_memory
from autobatch.training.export import examine_weights
from autobatch.training.split_check.check import ANYWAY, examine
from autobatch.training.split_check.compare import Finding
from autobatch.tuning.tune_plan import PlanTuner
from autobatch.workload.contract import Workload

OPENING = "opening the workload"
CHECKING_SPLIT = "checking that the loss can be split into micro-batches"
WHOLE = "a whole model fits on each rank, so each has its own"


class OpenSetup(NamedTuple):
    """The process that holds the setup, and the layout that it was opened with."""

    process: SetupProcess
    shard: ShardLayout | None
    """The layout of a shared model; None if each rank has a whole one."""
    reason: str | None
    """The reason for the layout; None if it was asked for."""


class Planned(NamedTuple):
    """The findings so far, and the process that they were made in."""

    process: SetupProcess
    result: Result
    shard: ShardLayout | None
    """The layout of a shared model; None if each rank has a whole one."""


def open_choice(
    workload: Workload | str | None, options: Options, context: RunContext, opened: ExitStack
) -> OpenSetup:
    """Open the setup as asked; ``auto`` shares the model if its weights alone are too large for some rank.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        opened: keeps the process open.
    """
    ranks = context.ranks
    if not _may_share(options, ranks):
        shard = shard_layout(options, ranks.world) if options.ranks.parallel == "shard" else None
        process = _open(workload, options, context, opened, shard=shard)
        return OpenSetup(process, process.info.layout, None)
    try:
        process = agree_on_fit(lambda: _open(workload, options, context, opened, may_share=True), ranks)
    except WholeModelTooLargeError as error:
        return _open_shared(workload, options, context, opened, str(error))
    return OpenSetup(process, None, WHOLE)


def search_and_plan(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    first: OpenSetup,
    opened: ExitStack,
) -> Planned:
    """Find the largest micro-batch, and plan the batch if there is one.

    ``auto`` shares the model if it does not fit whole on some rank. All ranks call it, and make the same
    choice. An interrupted probe of one process answers, but not one of several.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    process, shard, reason = first
    stage = _probe if options.command == "probe" else _probe_and_plan
    try:
        result = stage(process, options, context, shard, shard is None and _may_share(options, context.ranks))
    except WholeModelTooLargeError as error:
        process, shard, reason = _open_shared(workload, options, context, opened, str(error))
        result = stage(process, options, context, shard, False)
    if context.ranks.world > 1:
        result = _with_parallel(uninterrupted(result), options, shard, reason, context)
    return Planned(process, result, shard)


def finish_plan(
    planned: Planned, options: Options, context: RunContext, steps: int, order: Order | None = None
) -> Result:
    """Check the split of the loss, tune, choose the split of batches, and write what was asked for.

    Args:
        planned: what the search has found.
        options: options of the command.
        context: surroundings of the call.
        steps: optimizer steps of the run that is tuned for.
        order: the batches of the run; None if they are unknown.

    Raises:
        InputError: the loss cannot be split, or a split by size was asked for and would change results.
    """
    process, result, shard = planned
    tuner = None
    if options.command in ("tune", "fit"):
        result = uninterrupted(result)
        tuner = _open_tuner(process, options, steps, context, shard)
    is_tuned = tuner is not None and bool(tuner.trials or tuner.lr_trials)
    if options.command != "fit":
        _check_loss(process, result, options, context.progress)
    elif is_tuned and shard is None and options.split_check == "error":
        _refuse_split(process, result, context.progress)
    if tuner is not None and (tuner.trials or (options.command == "tune" and not tuner.lr_trials)):
        result = _add_tuning(tuner, result)
    write_memory_viz(process, result, options, context.progress)
    result = add_split(process, result, options, context, order=order)
    if tuner is None or not tuner.lr_trials:
        return result
    try:
        return _add_learning_rate(tuner, result)
    except KeyboardInterrupt:
        # Other ranks may be in the middle of a run, and a training would go on.
        if context.ranks.world > 1 or options.command == "fit":
            raise
        # The result so far is complete, and the next call continues the study.
        context.progress.note("interrupted: kept the learning rate")
        return result


def uninterrupted(result: Result) -> Result:
    """Return a result, or raise if its probe was interrupted, which ends the later stages too.

    Raises:
        KeyboardInterrupt: the probe was interrupted.
    """
    if result.probe is not None and result.probe.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return result


def shard_layout(options: Options, world: int) -> ShardLayout:
    """Return the layout in which this many ranks share a model."""
    return ShardLayout(world=world, sync=options.ranks.shard_sync, modules=options.ranks.shard_modules)


def refuse_weights(process: SetupProcess) -> None:
    """Raise if the weights could not be exported after training, before minutes are spent on a probe.

    Raises:
        InputError: they could not be.
    """
    process.call("the check of the weights", examine_weights)


def sizes_of(process: SetupProcess, result: Result) -> NDArray[np.float64] | None:
    """Return the sizes that a process has read, so that another need not read them again.

    Returns:
        None if the plan does not need them.
    """
    if result.plan is None or result.plan.size_cut is None:
        return None
    return process.call("reading the sizes of the samples", read_sizes)


def _may_share(options: Options, ranks: Ranks) -> bool:
    return options.ranks.parallel == "auto" and ranks.world > 1


def _open(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    opened: ExitStack,
    *,
    shard: ShardLayout | None = None,
    may_share: bool = False,
) -> SetupProcess:
    """Open the setup in a process that can be asked to try it."""
    ranks = context.ranks
    role = Role(world=ranks.world, shard=shard, holds_model=ranks.rank == 0, may_share=may_share)
    context.progress.doing(OPENING)
    return opened.enter_context(
        open_process(workload, options, role, isolated=context.isolated, standby=context.standby)
    )


def _open_shared(
    workload: Workload | str | None, options: Options, context: RunContext, opened: ExitStack, reason: str
) -> OpenSetup:
    """Open the setup of a shared model in place of a whole one."""
    opened.close()
    context.progress.note(reason)
    shard = shard_layout(options, context.ranks.world)
    process = _open(workload, options, context, opened, shard=shard)
    return OpenSetup(process, process.info.layout, reason)


def _probe(
    process: SetupProcess, options: Options, context: RunContext, _: ShardLayout | None, may_share: bool
) -> Result:
    """Find the largest micro-batch, or check the one that was asked for."""
    ranks, progress, asked = context.ranks, context.progress, options.search.micro_batch
    if asked is None:
        found = _limit(process, options, None, context, may_share=may_share)
        probe = find_limits_by_size(process, options, found.probe, progress=progress)
    else:
        size = asked

        def check() -> Limit:
            return Limit(check_size(process, size, progress=progress))

        # A larger size that does not fit is no reason to share the model.
        found = agree_on_fit(check, ranks) if may_share and asked == 1 else check()
        probe = found.probe
    of_ranks = limits_over_ranks(ranks, probe.micro_batch, process.info.device)
    limit = of_ranks[ranks.rank].limit
    if limit < probe.micro_batch:
        probe = msgspec.structs.replace(probe, micro_batch=limit, upper_bound_by=None)
    return Result(
        device=process.info.device,
        probe=msgspec.structs.replace(probe, ranks=of_ranks if ranks.world > 1 else []),
        profile=found.file,
        command=context.command,
    )


def _limit(
    process: SetupProcess, options: Options, share: int | None, context: RunContext, *, may_share: bool
) -> Limit:
    """Find the largest micro-batch on this rank alone, after a check that all ranks have the same workload.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits. All ranks raise it if they may share the model.
    """
    info, progress, ranks = process.info, context.progress, context.ranks

    def probe() -> Limit:
        return find_limit(
            process, options, share=share, home=context.home, progress=progress, clock=context.clock
        )

    limit = agree_on_fit(probe, ranks) if may_share else probe()
    order = Order(share, options.device.seed)
    limit = survive_real_batches(process, limit, order, progress=progress)
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    samples = None if info.epoch_samples is None else info.samples
    ranks.check_equal({"the model": info.key.get("model"), "the data": samples})
    check_data_of_ranks(info.data, ranks)
    return limit


def _probe_and_plan(
    process: SetupProcess, options: Options, context: RunContext, shard: ShardLayout | None, may_share: bool
) -> Result:
    """Find the largest micro-batch and plan the batch, also after an interrupted probe."""
    info, progress, ranks = process.info, context.progress, context.ranks
    world_size = 1
    if options.command == "plan" and ranks.world == 1:
        world_size = options.batch.world_size or launched_world_size(context.environ)
    # An invalid plan must fail before minutes are spent on a probe.
    _plan(info, 1, options, max(world_size, ranks.world), multiple=options.multiple or 1)
    share = rank_share(options.target_batch, world_size, 0)
    limit = _limit(process, options, share, context, may_share=may_share)
    alone = limit.probe.micro_batch
    if ranks.world == 1:
        limit, alone = limit_of_plan(process, limit, share, progress)
    multiple = math.lcm(*ranks.gather(limit.probe.multiple))
    plan = _plan(info, alone, options, world_size, multiple=multiple)
    of_ranks: list[RankLimit] = limits_over_ranks(ranks, alone, info.device) if ranks.world > 1 else []
    if of_ranks:
        plan = spread(plan, of_ranks, shard)
    _tell(plan, info.epoch_samples, progress)
    progress.doing("predicting the memory of a step")
    predicted, curve = predicted_memory(limit.footprint, info, limit.probe.micro_batch)
    return Result(
        device=info.device,
        probe=msgspec.structs.replace(limit.probe, ranks=of_ranks),
        plan=plan,
        profile=limit.file,
        title=info.name,
        command=context.command,
        predicted=predicted,
        memory_curve=curve,
    )


def _plan(info: SetupInfo, limit: int, options: Options, world_size: int, *, multiple: int) -> Plan:
    """Plan the batch under a limit on the micro-batch, of multiples of a number."""
    return make_plan(
        target_batch=options.target_batch,
        micro_batch_limit=limit,
        world_size=world_size,
        multiple=multiple,
        learning_rate=info.learning_rate,
        base_batch=options.batch.base_batch or info.base_batch,
        rule=options.batch.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def _tell(plan: Plan, epoch_samples: int | None, progress: Progress) -> None:
    """Report a plan, that its batch exceeds an epoch, and that its learning rate is that of another batch."""
    progress.planned(plan)
    if epoch_samples is not None and plan.target_batch > epoch_samples:
        epochs = decimal(plan.target_batch / epoch_samples, 3)
        progress.note(
            f"the batch of {plan.target_batch:,} is larger than the data: each step takes {epochs} epochs of "
            f"{plural(epoch_samples, 'sample')}"
        )
    if plan.learning_rate_rule == "none" and plan.base_batch not in (None, plan.target_batch):
        progress.note(f"learning rate {plan.learning_rate:g}: {plan.learning_rate_source}")


def _with_parallel(
    result: Result, options: Options, shard: ShardLayout | None, reason: str | None, context: RunContext
) -> Result:
    """Record in the probe and the plan whether ranks share the model, with the reasons."""
    sync = None if shard is None else shard.sync
    sync_reason = ONCE if sync not in (None, options.ranks.shard_sync) else None
    if sync_reason is not None:
        context.progress.note(f"gradients are reduced once per step (--shard-sync once): {sync_reason}")
    assert result.probe is not None
    probe = msgspec.structs.replace(
        result.probe,
        parallel="replicate" if shard is None else "shard",
        parallel_reason=reason,
        shard_sync=sync,
        shard_sync_reason=sync_reason,
    )
    plan = result.plan
    if plan is not None:
        plan = msgspec.structs.replace(plan, parallel_reason=reason, shard_sync_reason=sync_reason)
    return msgspec.structs.replace(result, probe=probe, plan=plan)


def _check_loss(process: SetupProcess, result: Result, options: Options, progress: Progress) -> None:
    """Check whether the loss can be split, as asked; an interrupted probe has no check.

    Where a note is enough, the check is an extra: if it fails, that is a note too.
    """
    probe, plan = result.probe, result.plan
    is_interrupted = probe is None or probe.micro_batch < 1 or probe.stopped_by == "interrupt"
    if probe is None or is_interrupted or options.split_check == "off":
        return
    if process.info.layout is not None:
        progress.note(
            "autobatch fit checks on rank 0 that the loss can be split, because the ranks share the model"
        )
        return
    if plan is not None and options.split_check == "error":
        _refuse_split(process, result, progress)
        return
    micro_batch = probe.micro_batch if plan is None else plan.micro_batch
    steps = 2 if plan is None else plan.accumulation_steps
    progress.doing(CHECKING_SPLIT)
    try:
        found = process.call("the check of the loss", examine, micro_batch, steps)
    except ChildCrashed as crash:
        process.restart()
        found = Finding(unchecked=str(crash))
    except AutobatchError as error:
        found = Finding(unchecked=str(error))
    except KeyboardInterrupt:
        if options.command == "tune":
            raise
        found = Finding(unchecked="the check was interrupted")
    if plan is None:
        found = found._replace(remarks=())  # a probe has no batch to split
    for line in found.notes(is_split=steps > 1):
        progress.note(line)


def _refuse_split(process: SetupProcess, result: Result, progress: Progress) -> None:
    """Raise if the loss cannot be split into the micro-batches of the plan, before minutes are spent."""
    plan = result.plan
    if plan is None or plan.accumulation_steps < 2:
        return
    progress.doing(CHECKING_SPLIT)
    found = process.call("the check of the loss", examine, plan.micro_batch, plan.accumulation_steps)
    if found.fault is not None:
        raise InputError(f"{found.fault}. {ANYWAY}")


def _open_tuner(
    process: SetupProcess, options: Options, steps: int, context: RunContext, shard: ShardLayout | None
) -> PlanTuner:
    """Return the tuner of a plan, whose time starts now; it tries nothing of a model that ranks share."""
    tuner = PlanTuner(
        process=process,
        options=options,
        planned_steps=steps,
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


def _add_tuning(tuner: PlanTuner, result: Result) -> Result:
    """Put the fastest configuration into a result."""
    assert result.plan is not None
    assert result.probe is not None
    plan, tuning = tuner.tune(result.plan, result.probe.micro_batch)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def _add_learning_rate(tuner: PlanTuner, result: Result) -> Result:
    """Put the best learning rate into a result, beside the trials if there were any."""
    assert result.plan is not None
    plan, found = tuner.tune_learning_rate(result.plan)
    nothing = Tuning(trials=0, best={}, baseline_samples_per_s=0.0, best_samples_per_s=0.0, study="")
    tuning = msgspec.structs.replace(result.tuning or nothing, learning_rate=found)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def write_memory_viz(process: SetupProcess, result: Result, options: Options, progress: Progress) -> None:
    """Write the memory of a few steps of the result to ``--memory-viz``, if it was asked for.

    Raises:
        InputError: the file cannot be written.
    """
    probe, plan = result.probe, result.plan
    if options.search.memory_viz is None or probe is None or probe.micro_batch < 1:
        return
    progress.doing("recording the memory of a few steps")
    content = step_snapshot(
        process, probe.micro_batch if plan is None else plan.micro_batch, {} if plan is None else plan.knobs
    )
    if content is None:
        progress.note("--memory-viz: nothing was written, because the steps did not run on CUDA")
        return
    path = Path(options.search.memory_viz)
    try:
        write_atomic(path, content)
    except OSError as error:
        raise InputError(
            f"--memory-viz {path} cannot be written: {error.strerror or error}. Give another file"
        ) from error
    progress.note(f"the memory of a few steps is in {path}: open it at pytorch.org/memory_viz")


def add_split(
    process: SetupProcess,
    result: Result,
    options: Options,
    context: RunContext,
    *,
    order: Order | None = None,
) -> Result:
    """Put the split into the plan of a result, with a note on the choice; all ranks call it.

    If the order of the run is known, samples that are joined may share larger micro-batches, and that plan is
    taken unless a split by size is faster. A choice that fails is no reason to end a run that can split by
    count. Of a plan alone, an interrupted choice keeps the result.

    Raises:
        InputError: a split by size was asked for, and would change results.
    """
    plan, probe, progress, ranks = result.plan, result.probe, context.progress, context.ranks
    if plan is None or probe is None or probe.stopped_by == "interrupt":
        return result
    if process.info.epoch_samples is None:
        if options.batch.split == "size":
            raise InputError(
                "--split size needs the sizes of all samples, and the data are a stream: use --split count, "
                "or give data with an index"
            )
        return result
    if plan.world_size > 1 and not _may_cut_jointly(plan, options, ranks):
        return result
    # A rank's share of a batch is about its share of a joint cut.
    share = max(1, plan.ranks[ranks.rank].samples) if plan.ranks else plan.target_batch
    settings = _settings_of(probe, options, share)
    by_count = of_rank = msgspec.structs.replace(plan, target_batch=share)
    progress.doing("choosing how batches are split")
    try:
        if order is not None and plan.world_size == 1 and probe.stopped_by is None:
            by_count = _in_run_order(process, of_rank, order, settings.cap)
        choice = _choose(process, by_count, settings)
    except KeyboardInterrupt:
        if options.command != "plan":
            raise
        choice = SplitChoice(None, "batches are split by count: the choice was interrupted")
    if choice.note is not None:
        progress.note(choice.note)
    cut = agree_on_cut(ranks, choice.cut)
    if cut is None and by_count.run_order is None:
        return result
    if cut is None:
        progress.note(describe_run_order(by_count))
        progress.planned(by_count)
        return msgspec.structs.replace(result, plan=by_count)
    plan = msgspec.structs.replace(plan, split="size", size_cut=cut)
    return msgspec.structs.replace(result, plan=plan)


def _settings_of(probe: Probe, options: Options, share: int) -> SplitSettings:
    """Return the settings of the choice for a rank that takes ``share`` samples of a batch."""
    cap = options.search.max_micro_batch or options.target_batch
    # Above the limit, the workload may not run for another reason than memory.
    cap = probe.micro_batch if probe.upper_bound_by == "error" else cap
    # A split by size is checked against the batches of the run on its own.
    limit = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    return SplitSettings(options.batch.split, limit, min(cap, share), options.device.seed)


def _choose(process: SetupProcess, plan: Plan, settings: SplitSettings) -> SplitChoice:
    """Return the choice; a failure chooses the split by count."""
    try:
        return process.call("the choice of the split", choose_split, plan, settings)
    except InputError:
        raise
    except AutobatchError as error:
        if isinstance(error, ChildCrashed):
            process.restart()
        return SplitChoice(None, f"batches are split by count: {error}")


def _may_cut_jointly(plan: Plan, options: Options, ranks: Ranks) -> bool:
    """Return whether the ranks of a plan may cut batches by size together.

    Raises:
        InputError: a split by size was asked for, and another loop will run the plan.
    """
    if ranks.world == 1 and options.batch.split == "size":
        raise InputError(
            f"--split size over {plan.world_size} ranks is for autobatch fit: use --split count to plan for "
            "another loop"
        )
    # A joint cut has the least limit of all ranks for each size, which is too low for larger GPUs.
    is_alike = len({one.kind for one in plan.ranks}) == 1
    return ranks.world > 1 and (is_alike or options.batch.split == "size")


def _in_run_order(process: SetupProcess, plan: Plan, order: Order, cap: int) -> Plan:
    """Return a plan with the largest micro-batch that fits in the order of the run, or the same plan.

    Args:
        process: holds the setup.
        plan: a plan for one rank, whose micro-batch fits in any order.
        order: the batches of the run.
        cap: the largest micro-batch to try.
    """
    found = ask_or_none(process, "a look at the order of the run", find_in_order, plan, order, cap)
    if found is None:
        return plan
    sizes = micro_batches(plan.target_batch, found.micro_batch)
    return msgspec.structs.replace(
        plan,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        run_order=RunOrder(
            batches=found.batches,
            by=found.by,
            micro_batch_in_any_order=plan.micro_batch,
            digest=process.info.sizes_digest or "",
        ),
    )
