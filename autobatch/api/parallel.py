"""The choice between a whole model on each rank and a model that the ranks share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from autobatch.api import unpack
from autobatch.api.confirm import Together
from autobatch.api.over_ranks import WholeModelTooLargeError
from autobatch.api.pipeline import RunContext, open_setup_process, probe_and_plan, uninterrupted
from autobatch.core.errors import InputError
from autobatch.core.options import FitOptions
from autobatch.core.records import Plan
from autobatch.distributed.layout import ShardLayout
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.ranks import Ranks
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


def probe_choice(
    workload: Workload | str | None,
    options: FitOptions,
    context: RunContext,
    process: SetupProcess,
    opened: ExitStack,
) -> Probed:
    """Probe and plan as asked; ``auto`` shares the model if it does not fit whole on some rank.

    All ranks call it, and choose alike.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        process: holds the setup, with the layout that was asked for.
        opened: keeps the process open.
    """
    ranks = context.ranks
    shard = asked_layout(options, ranks)
    is_open = options.parallel == "auto" and ranks.world > 1
    reason: str | None = WHOLE if is_open else None
    try:
        together = Together(shard, is_open, options.grad_sync)
        result = probe_and_plan(process, options, context, together=together)
    except WholeModelTooLargeError as error:
        opened.close()
        shard, reason = unpack.shard_layout(options, ranks.world), str(error)
        context.progress.note(reason)
        process = opened.enter_context(open_setup_process(workload, options, context, shard))
        together = Together(shard, grad_sync=options.grad_sync)
        result = probe_and_plan(process, options, context, together=together)
    result = uninterrupted(result)
    assert result.plan is not None
    plan = msgspec.structs.replace(result.plan, parallel_reason=reason)
    return Probed(process, msgspec.structs.replace(result, plan=plan), shard)


def layout_of_resume(plan: Plan, options: FitOptions, ranks: Ranks) -> ShardLayout | None:
    """Return the way in which ranks share the model of a run that is resumed: as asked, else as before."""
    if ranks.world == 1:
        return None
    if options.parallel != "auto":
        return asked_layout(options, ranks)
    before = layout_of(plan)
    return None if before is None else msgspec.structs.replace(before, world=ranks.world)
