"""The micro-batch that fits on every rank of a library whose ranks all run the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autobatch.core.errors import DoesNotFitError
from autobatch.report.result import PlanResult

ALONE = (
    "each process has planned for itself, because they are not connected before fit: on GPUs with unlike "
    "free memory, give a memory_budget that all of them have, or plan in the callback"
)


class Agreement(NamedTuple):
    """A plan of this rank, and what all ranks have in common."""

    plan: PlanResult
    limit: int
    """The smallest micro-batch that a rank planned, in samples."""
    note: str | None
    """Remark if another rank limits this one, or the others could not be asked."""


def plan_with_ranks(find: Callable[[], PlanResult], world_size: int) -> Agreement:
    """Plan on this rank, and agree with the others on the smallest limit; all ranks call it.

    Args:
        find: plans on this rank.
        world_size: number of ranks.

    Raises:
        DoesNotFitError: another rank has no plan; its own message says why.
    """
    if world_size == 1:
        found = find()
        return Agreement(found, found.micro_batch, None)
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.messages import join_existing

    ranks = join_existing(world_size)
    if ranks is None:
        found = find()
        return Agreement(found, found.micro_batch, ALONE)
    try:
        found = find()
    except Exception:
        ranks.gather(0)
        raise
    limits = ranks.gather(found.micro_batch)
    if 0 in limits:
        raise DoesNotFitError(f"rank {limits.index(0)} has no plan: its own message says why")
    least = min(limits)
    if least == found.micro_batch:
        return Agreement(found, least, None)
    rank = limits.index(least)
    return Agreement(found, least, f"all ranks run micro-batches of at most {least}, as fit on rank {rank}")
