"""The stage that finds the largest micro-batch, and plans a batch with it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.api import unpack
from autobatch.api.context import RunContext
from autobatch.api.over_ranks import agree_on_fit, check_data_of_ranks
from autobatch.core.files import write_output
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records.plan import Plan
from autobatch.distributed.launch import check_equal
from autobatch.distributed.rank_plan import limits_over_ranks, spread
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import rank_share
from autobatch.report.result import Result
from autobatch.report.words import decimal, plural
from autobatch.search.find_limit import check_size, find_limit
from autobatch.search.one_probe import Limit
from autobatch.search.planned_sizes import limit_of_plan
from autobatch.search.sizes.limits_by_size import find_limits_by_size
from autobatch.search.sizes.real_batches import Order
from autobatch.search.sizes.survive import survive_real_batches
from autobatch.search.step_snapshot import step_snapshot
from autobatch.setup.child import SetupProcess
from autobatch.setup.open_process import open_process
from autobatch.setup.setup import Role
from autobatch.setup.trace import predicted_memory
from autobatch.workload.contract import Workload

OPENING = "opening the workload"


class JointSettings(NamedTuple):
    """Settings of joint training on which a probe and a plan depend."""

    shard: ShardLayout | None = None
    """The layout of a shared model; None if each rank has a whole one."""
    may_share: bool = False
    """True if ranks may share a model that does not fit whole."""


def open_setup_process(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    shard: ShardLayout | None = None,
    *,
    may_share: bool = False,
) -> AbstractContextManager[SetupProcess]:
    """Open the setup in a process that can be asked to try it.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        shard: the way in which ranks share the model; None if each has a whole one.
        may_share: whether ranks may share a model that is too large for one of them.
    """
    ranks = context.ranks
    role = Role(world=ranks.world, shard=shard, holds_model=ranks.rank == 0, may_share=may_share)
    context.progress.doing(OPENING)
    return open_process(workload, options, role, isolated=context.isolated, spare=context.spare)


def probe_only(
    process: SetupProcess, options: Options, context: RunContext, together: JointSettings
) -> Result:
    """Find the largest micro-batch, or check the one that was asked for; all ranks call it.

    Args:
        process: holds the setup.
        options: options of the command.
        context: surroundings of the call.
        together: how the ranks of a run train together.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    ranks, progress, asked = context.ranks, context.progress, options.search.micro_batch

    def check() -> Limit:
        assert asked is not None
        return Limit(check_size(process, asked, progress=progress))

    if asked is None:
        found = _limit(process, options, None, context, together)
        probe = find_limits_by_size(
            process,
            options,
            found.probe,
            progress=progress,
        )
    else:
        # A larger size that does not fit is no reason to share the model.
        found = agree_on_fit(check, ranks) if together.may_share and asked == 1 else check()
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
    process: SetupProcess,
    options: Options,
    share: int | None,
    context: RunContext,
    together: JointSettings,
) -> Limit:
    """Find the largest micro-batch on this rank alone, after a check that all ranks have the same workload.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits. All ranks raise it if they may share the model.
    """
    info, progress = process.info, context.progress

    def probe() -> Limit:
        return find_limit(
            process, options, share=share, home=context.home, progress=progress, clock=context.clock
        )

    limit = agree_on_fit(probe, context.ranks) if together.may_share else probe()
    limit = survive_real_batches(process, limit, Order(share, options.device.seed), progress=progress)
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    samples = None if info.epoch_samples is None else info.samples
    check_equal(context.ranks.gather({"the model": info.key.get("model"), "the data": samples}))
    check_data_of_ranks(info.data, context.ranks)
    return limit


def probe_and_plan(
    process: SetupProcess,
    options: Options,
    context: RunContext,
    together: JointSettings = JointSettings(),  # noqa: B008 - plain values
    *,
    world_size: int = 1,
) -> Result:
    """Find the largest micro-batch and plan the batch, also after an interrupted probe; all ranks call it.

    Args:
        process: holds the setup.
        options: options of the command.
        context: surroundings of the call.
        together: how the ranks of a run train together.
        world_size: data-parallel ranks of another launcher that share a batch.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
        DoesNotFitError: not even a micro-batch of 1 fits. All ranks raise it if they may share the model.
    """
    info, progress, ranks = process.info, context.progress, context.ranks
    # An invalid plan must fail before minutes are spent on a probe.
    asked = options.multiple or 1
    unpack.plan_for(info, 1, options, max(world_size, ranks.world), multiple=asked)
    share = rank_share(options.target_batch, world_size, 0)
    limit = _limit(process, options, share, context, together)
    alone = limit.probe.micro_batch
    if ranks.world == 1:  # of several ranks, the batch itself runs
        limit, alone = limit_of_plan(process, limit, share, progress)
    multiple = math.lcm(*ranks.gather(limit.probe.multiple))
    plan = unpack.plan_for(info, alone, options, world_size, multiple=multiple)

    of_ranks = limits_over_ranks(ranks, alone, info.device) if ranks.world > 1 else []
    if of_ranks:
        plan = spread(plan, of_ranks, together.shard)
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


def _several_epochs(target_batch: int, epoch_samples: int) -> str:
    epochs = decimal(target_batch / epoch_samples, 3)
    return (
        f"the batch of {target_batch:,} is larger than the data: each step takes {epochs} epochs of "
        f"{plural(epoch_samples, 'sample')}"
    )


def _tell(plan: Plan, epoch_samples: int | None, progress: Progress) -> None:
    """Report a plan, that its batch exceeds an epoch, and that its learning rate is that of another batch."""
    progress.planned(plan)
    if epoch_samples is not None and plan.target_batch > epoch_samples:
        progress.note(_several_epochs(plan.target_batch, epoch_samples))
    if plan.learning_rate_rule == "none" and plan.base_batch not in (None, plan.target_batch):
        progress.note(f"learning rate {plan.learning_rate:g}: {plan.learning_rate_source}")


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
        progress.note("--memory-viz: nothing was written, because the steps gave no record of their memory")
        return
    path = write_output(Path(options.search.memory_viz), content, "--memory-viz")
    progress.note(f"the memory of a few steps is in {path}: open it at pytorch.org/memory_viz")


def uninterrupted(result: Result) -> Result:
    """Return a result, or raise if its probe was interrupted, which ends the later stages too.

    Raises:
        KeyboardInterrupt: the probe was interrupted.
    """
    if result.probe is not None and result.probe.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return result
