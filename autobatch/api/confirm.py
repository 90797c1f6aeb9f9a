"""The limits of all ranks, confirmed by one batch over all of them before any training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from autobatch.core.errors import DoesNotFitError
from autobatch.core.progress import Progress
from autobatch.core.records.probe import Attempt, RankLimit
from autobatch.core.units import format_bytes
from autobatch.distributed.rank_plan import limits_over_ranks, meeting_place
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.search.confirm import joint_batch, run_joint_batch
from autobatch.setup.child import SetupProcess

MOST_TRIES = 6
"""Batches over all ranks, each in smaller micro-batches than the one before."""
STEP_DOWN = 8
"""Part of a micro-batch by which it shrinks after a failure."""


class JointSettings(NamedTuple):
    """Settings of joint training on which a probe and a plan depend."""

    shard: ShardLayout | None = None
    """The layout of a shared model; None if each rank has a whole one."""
    may_share: bool = False
    """True if ranks may share a model that does not fit whole."""
    grad_sync: Literal["auto", "overlap", "after"] = "auto"
    """The engine that was asked for if each rank has a whole model."""


class JointLimits(NamedTuple):
    """The limits of all ranks, and the attempts of this rank in batches of all ranks."""

    limits: list[RankLimit]
    attempts: list[Attempt]
    skipped: str | None = None
    """Reason why no batch of all ranks ran; None if one did, or for one rank."""


def confirmed_limits(  # noqa: PLR0917 - what a batch over ranks is made of
    process: SetupProcess,
    sizes_for: Callable[[list[RankLimit]], Sequence[Sequence[int]]],
    limit: int,
    together: JointSettings,
    ranks: Ranks,
    progress: Progress,
) -> JointLimits:
    """Return limits whose micro-batches ran over all ranks; all of them call it.

    A process that cannot be replaced runs no such batch, because a failure would end the run.

    Args:
        process: holds the setup.
        sizes_for: returns the micro-batches of each rank for some limits.
        limit: the largest micro-batch that fits on this rank alone.
        together: how the ranks train together.
        ranks: the ranks.
        progress: receives attempts and notes.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits beside the other ranks.
    """

    def of_all(size: int) -> list[RankLimit]:
        return limits_over_ranks(ranks, size, process.info.device)

    limits, attempts = of_all(limit), list[Attempt]()
    if ranks.world == 1:
        return JointLimits(limits, attempts)
    skipped = _obstacle(process, ranks, progress)
    if skipped is not None:
        return JointLimits(limits, attempts, skipped)
    for _ in range(MOST_TRIES):
        place = meeting_place(ranks)
        if place is None:
            break
        progress.doing("running a batch over all ranks")
        batch = joint_batch(sizes_for(limits), ranks.rank, together.grad_sync)
        found = run_joint_batch(process, place, batch)
        attempts.append(found)
        progress.attempted(found)
        reasons = ranks.gather(found.reason)
        failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
        if not failed:
            if ranks.agree(not found.fits):
                skipped = "a child ended"
                progress.note("no batch over all ranks ran before the training, because a child ended")
            break
        first = failed[0]
        progress.note(
            f"out of memory on rank {first} in a batch over all ranks ({reasons[first].rstrip('.')}): the "
            "micro-batch there is lowered"
        )
        if ranks.rank in failed:
            limit = _smaller(found, process.info.device.budget_bytes, ranks.world)
        limits = of_all(limit)
    return JointLimits(limits, attempts, skipped)


def _obstacle(process: SetupProcess, ranks: Ranks, progress: Progress) -> str | None:
    """Return why no batch over all ranks can run, with a note; None if one can."""
    found = [one for one in ranks.gather(None if process.is_replaceable else process.reason) if one]
    if not found:
        return None
    progress.note(
        f"no batch over all ranks ran before the training: {found[0]}. autobatch fit, started with --ranks "
        "or by torchrun, runs one in child processes"
    )
    return str(found[0])


def _smaller(failed: Attempt, budget_bytes: int, world: int) -> int:
    """Return the micro-batch to try after one that did not fit beside the other ranks."""
    size = failed.micro_batch
    if size <= 1:
        raise DoesNotFitError(
            f"a micro-batch of 1 fits on this rank alone, but not in a batch over {world} ranks in the "
            f"budget of {format_bytes(budget_bytes)}: {failed.reason}. What helps: a larger --memory-budget"
        )
    return size - max(1, size // STEP_DOWN)
