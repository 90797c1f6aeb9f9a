"""The choice between a whole model on each rank and a model that the ranks share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from autobatch.api import unpack
from autobatch.api.confirm import Together
from autobatch.api.context import RunContext
from autobatch.api.over_ranks import WholeModelTooLargeError, agree_on_fit
from autobatch.api.pipeline import open_setup_process, probe_and_plan, uninterrupted
from autobatch.core.errors import InputError
from autobatch.core.options import FitOptions
from autobatch.core.records import Plan
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.probing.child import SetupProcess
from autobatch.report.result import Result
from autobatch.workload.contract import Workload

WHOLE = "a whole model fits on each rank, so each has its own"


class Probed(NamedTuple):
    """A plan, and the process that it was probed in."""

    process: SetupProcess
    result: Result
    shard: ShardLayout | None
    """The way in which ranks share the model; None if each has a whole one."""


def check_parallel(options: FitOptions, ranks: Ranks) -> None:
    """Check that ranks can share a model as asked.

    Raises:
        InputError: there is one rank, or an option of whole models was given too.
    """
    if options.parallel != "shard":
        return
    if ranks.world == 1:
        raise InputError(
            "--parallel shard shares a model among ranks, found one process: give --ranks N with N at least "
            "2, or start with torchrun"
        )
    if options.trials or options.tune_lr:
        asked = "--tune-lr" if options.tune_lr else f"--trials {options.trials}"
        raise InputError(
            f"{asked} measures whole models, and --parallel shard shares one: give --trials 0, or "
            "--parallel replicate"
        )
    if options.split == "size":
        raise InputError("--split size is for whole models: use --split count with --parallel shard")


def asked_layout(options: FitOptions, ranks: Ranks) -> ShardLayout | None:
    """Return the way in which ranks share the model if that was asked for; None for whole models first."""
    return unpack.shard_layout(options, ranks.world) if options.parallel == "shard" else None


class Opened(NamedTuple):
    """The process that holds the setup, and the layout that it was opened with."""

    process: SetupProcess
    shard: ShardLayout | None
    reason: str | None
    """The reason for the layout; None if it was asked for."""


def open_choice(
    workload: Workload | str | None, options: FitOptions, context: RunContext, opened: ExitStack
) -> Opened:
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
        return Opened(process, shard, None)

    def whole() -> SetupProcess:
        return opened.enter_context(open_setup_process(workload, options, context, may_share=True))

    try:
        return Opened(agree_on_fit(whole, ranks), None, WHOLE)
    except WholeModelTooLargeError as error:
        return _open_shared(workload, options, context, opened, str(error))


def probe_choice(
    workload: Workload | str | None,
    options: FitOptions,
    context: RunContext,
    first: Opened,
    opened: ExitStack,
) -> Probed:
    """Probe and plan as asked; ``auto`` shares the model if it does not fit whole on some rank.

    All ranks call it, and choose alike.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        first: of `open_choice`.
        opened: keeps the process open.
    """
    process, shard, reason = first
    may_share = shard is None and _may_share(options, context.ranks)
    try:
        together = Together(shard, may_share, options.grad_sync)
        result = probe_and_plan(process, options, context, together=together)
    except WholeModelTooLargeError as error:
        process, shard, reason = _open_shared(workload, options, context, opened, str(error))
        together = Together(shard, grad_sync=options.grad_sync)
        result = probe_and_plan(process, options, context, together=together)
    result = uninterrupted(result)
    assert result.plan is not None
    plan = msgspec.structs.replace(result.plan, parallel_reason=reason)
    return Probed(process, msgspec.structs.replace(result, plan=plan), shard)


def _may_share(options: FitOptions, ranks: Ranks) -> bool:
    return options.parallel == "auto" and ranks.world > 1


def _open_shared(
    workload: Workload | str | None, options: FitOptions, context: RunContext, opened: ExitStack, reason: str
) -> Opened:
    """Open the setup of a shared model in place of a whole one."""
    opened.close()
    context.progress.note(reason)
    shard = unpack.shard_layout(options, context.ranks.world)
    process = opened.enter_context(open_setup_process(workload, options, context, shard))
    return Opened(process, shard, reason)


def layout_of_resume(plan: Plan, options: FitOptions, ranks: Ranks) -> ShardLayout | None:
    """Return the way in which ranks share the model of a run that is resumed: as asked, else as before."""
    if ranks.world == 1:
        return None
    if options.parallel != "auto":
        return asked_layout(options, ranks)
    before = layout_of(plan)
    return None if before is None else msgspec.structs.replace(before, world=ranks.world)
