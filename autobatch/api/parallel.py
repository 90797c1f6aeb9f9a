"""The choice between a whole model on each rank and a model that the ranks share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from autobatch.api import unpack
from autobatch.api.context import RunContext
from autobatch.api.over_ranks import WholeModelTooLargeError, agree_on_fit
from autobatch.api.probe_stage import JointSettings, open_setup_process, uninterrupted
from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records.plan import Plan
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ONCE, ShardLayout
from autobatch.report.result import Result
from autobatch.setup.child import SetupProcess
from autobatch.workload.contract import Workload

WHOLE = "a whole model fits on each rank, so each has its own"
Stage = Callable[[SetupProcess, Options, RunContext, JointSettings], Result]
"""Function that probes in an open process, and may plan."""


class StageResult(NamedTuple):
    """A plan, and the process that it was probed in."""

    process: SetupProcess
    result: Result
    shard: ShardLayout | None
    """The layout of a shared model; None if each rank has a whole one."""


def check_parallel(options: Options, ranks: Ranks) -> None:
    """Check that several ranks run if they are to share a model.

    Raises:
        InputError: there is one rank.
    """
    if options.ranks.parallel == "shard" and ranks.world == 1:
        raise InputError(
            "--parallel shard shares a model among ranks, found one process: give --ranks N with N at least "
            "2, or start with torchrun"
        )


def asked_layout(options: Options, ranks: Ranks) -> ShardLayout | None:
    """Return the layout of a shared model if one was asked for; None to try whole models first."""
    return unpack.shard_layout(options, ranks.world) if options.ranks.parallel == "shard" else None


class OpenSetup(NamedTuple):
    """The process that holds the setup, and the layout that it was opened with."""

    process: SetupProcess
    shard: ShardLayout | None
    reason: str | None
    """The reason for the layout; None if it was asked for."""


def open_choice(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    opened: ExitStack,
) -> OpenSetup:
    """Open the setup as asked; ``auto`` shares the model if its weights alone are too large for some rank.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        opened: keeps the process open.
    """
    ranks, shard = context.ranks, asked_layout(options, context.ranks)
    if not _may_share(options, ranks):
        process = opened.enter_context(open_setup_process(workload, options, context, shard))
        return OpenSetup(process, process.info.layout, None)

    def whole() -> SetupProcess:
        return opened.enter_context(open_setup_process(workload, options, context, may_share=True))

    try:
        return OpenSetup(agree_on_fit(whole, ranks), None, WHOLE)
    except WholeModelTooLargeError as error:
        return _open_shared(workload, options, context, opened, str(error))


def probe_choice(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    first: OpenSetup,
    opened: ExitStack,
    *,
    stage: Stage,
) -> StageResult:
    """Probe as asked; ``auto`` shares the model if it does not fit whole on some rank.

    All ranks call it, and make the same choice. An interrupted probe of one process answers, but not one
    of several.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        first: of `open_choice`.
        opened: keeps the process open.
        stage: probes.
    """
    process, shard, reason = first
    may_share = shard is None and _may_share(options, context.ranks)
    try:
        together = JointSettings(shard, may_share)
        result = stage(process, options, context, together)
    except WholeModelTooLargeError as error:
        process, shard, reason = _open_shared(workload, options, context, opened, str(error))
        result = stage(process, options, context, JointSettings(shard))
    if context.ranks.world == 1:
        return StageResult(process, result, shard)
    return StageResult(process, with_parallel(uninterrupted(result), options, shard, reason, context), shard)


def with_parallel(
    result: Result, options: Options, shard: ShardLayout | None, reason: str | None, context: RunContext
) -> Result:
    """Record in the probe and the plan whether ranks share the model, with the reasons.

    Args:
        result: of several ranks.
        options: what was asked for.
        shard: the model that the ranks share; None if each has a whole one.
        reason: for sharing or not; None if it was asked for.
        context: receives a note on what is not as asked.
    """
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


def _may_share(options: Options, ranks: Ranks) -> bool:
    return options.ranks.parallel == "auto" and ranks.world > 1


def _open_shared(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    opened: ExitStack,
    reason: str,
) -> OpenSetup:
    """Open the setup of a shared model in place of a whole one."""
    opened.close()
    context.progress.note(reason)
    shard = unpack.shard_layout(options, context.ranks.world)
    process = opened.enter_context(open_setup_process(workload, options, context, shard))
    return OpenSetup(process, process.info.layout, reason)


def layout_of_resume(plan: Plan, options: Options, ranks: Ranks) -> ShardLayout | None:
    """Return the layout of the shared model of a resumed run: as asked, else as before."""
    if ranks.world == 1:
        return None
    if options.ranks.parallel != "auto":
        return asked_layout(options, ranks)
    before = layout_of(plan)
    return None if before is None else msgspec.structs.replace(before, world=ranks.world)
