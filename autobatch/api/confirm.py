"""The plan of a batch over ranks, confirmed by one batch over all of them before any training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from autobatch.core.errors import DoesNotFitError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, Plan
from autobatch.core.units import format_bytes
from autobatch.distributed.rank_plan import meeting_place, plan_over_ranks
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.probing.child import SetupProcess
from autobatch.probing.confirm import joint_batch, run_joint_batch

MOST_TRIES = 6
"""Batches over all ranks, each in smaller micro-batches than the one before."""
STEP_DOWN = 8
"""Part of a micro-batch by which it shrinks after a failure."""


class Together(NamedTuple):
    """The way in which the ranks of a run train together, as far as a probe and a plan depend on it."""

    shard: ShardLayout | None = None
    """The model that they share; None if each has a whole one."""
    may_share: bool = False
    """True if they may share a model that does not fit whole."""
    grad_sync: Literal["auto", "overlap", "after"] = "auto"
    """The engine that was asked for if each has a whole model."""


class Confirmed(NamedTuple):
    """A plan over ranks, and the attempts of this rank in batches of all ranks."""

    plan: Plan
    attempts: list[Attempt]


def confirmed_plan(  # noqa: PLR0917 - what a plan is made of
    process: SetupProcess,
    plan_for: Callable[[int], Plan],
    limit: int,
    together: Together,
    ranks: Ranks,
    progress: Progress,
) -> Confirmed:
    """Return a plan whose micro-batches ran over all ranks; all of them call it.

    A process that cannot be replaced runs no such batch, because a failure would end the run.

    Args:
        process: holds the setup.
        plan_for: returns the plan of one process for a limit.
        limit: the largest micro-batch that fits on this rank alone.
        together: how the ranks train together.
        ranks: the ranks.
        progress: receives attempts and notes.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits beside the other ranks.
    """

    def over_ranks(size: int) -> Plan:
        return plan_over_ranks(ranks, plan_for(size), size, process.info.device, together.shard)

    plan, attempts = over_ranks(limit), list[Attempt]()
    if ranks.world == 1 or not ranks.agree(process.is_replaceable):
        return Confirmed(plan, attempts)
    for number in range(MOST_TRIES):
        place = meeting_place(ranks, number)
        if place is None:
            break
        progress.doing("running a batch over all ranks")
        of_ranks = [one.micro_batches for one in plan.ranks]
        found = run_joint_batch(process, place, joint_batch(of_ranks, ranks.rank, together.grad_sync))
        attempts.append(found)
        progress.attempted(found)
        reasons = ranks.gather(found.reason)
        failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
        if not failed:
            is_lost = ranks.agree(not found.fits)
            if is_lost:
                progress.note("no batch over all ranks ran before the training, because a child ended")
            break
        first = failed[0]
        progress.note(
            f"out of memory on rank {first} in a batch over all ranks ({reasons[first].rstrip('.')}): the "
            "micro-batch there is lowered"
        )
        if ranks.rank in failed:
            limit = _smaller(found, process.info.device.budget_bytes, ranks.world)
        plan = over_ranks(limit)
    return Confirmed(plan, attempts)


def _smaller(failed: Attempt, budget_bytes: int, world: int) -> int:
    """Return the micro-batch to try after one that did not fit beside the other ranks."""
    size = failed.micro_batch
    if size <= 1:
        raise DoesNotFitError(
            f"a micro-batch of 1 fits on this rank alone, but not in a batch over {world} ranks in the "
            f"budget of {format_bytes(budget_bytes)}: {failed.reason}. What helps: a larger --memory-budget"
        )
    return size - max(1, size // STEP_DOWN)
