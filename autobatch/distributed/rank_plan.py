"""The plan of a batch over ranks, and the engine that a loop gets for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autobatch.core.records import DeviceRecord, Plan, RankPlan
from autobatch.distributed.engine import Engine, OneProcess
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.shares import Place, RankSplit, kinds_of, least_of_each_kind, shares
from autobatch.planning import micro_batches
from autobatch.workload.split import Split

if TYPE_CHECKING:
    import torch


def plan_over_ranks(ranks: Ranks, plan: Plan, limit: int, device: DeviceRecord) -> Plan:
    """Return the plan of one process, spread over all ranks; all of them call it.

    Args:
        ranks: the ranks.
        plan: the plan as one process would run it.
        limit: the largest micro-batch that fits on this rank.
        device: the device of this rank.
    """
    if ranks.world == 1:
        return plan
    found = ranks.gather([ranks.host, device.name, device.total_bytes, device.budget_bytes, limit])
    kinds = kinds_of([Place(*one[1:4]) for one in found])
    limits = least_of_each_kind([one[4] for one in found], kinds)
    of_ranks = [
        RankPlan(
            rank=rank,
            host=found[rank][0],
            device=found[rank][1],
            kind=kinds[rank],
            limit=limits[rank],
            samples=samples,
            micro_batches=micro_batches(samples, limits[rank]),
        )
        for rank, samples in enumerate(shares(plan.target_batch, limits))
    ]
    first = of_ranks[0].micro_batches
    return msgspec.structs.replace(
        plan,
        world_size=ranks.world,
        ranks=of_ranks,
        micro_batch=max(first, default=0),
        accumulation_steps=len(first),
        micro_batches=first,
    )


def limit_of_rank(ranks: Ranks, plan: Plan) -> int:
    """Return the largest micro-batch of this rank in a plan."""
    return plan.ranks[ranks.rank].limit if plan.ranks else plan.micro_batch


def share_of_rank(ranks: Ranks, plan: Plan, samples: int) -> int:
    """Return the samples that this rank takes of a batch of so many."""
    return shares(samples, [one.limit for one in plan.ranks])[ranks.rank] if plan.ranks else samples


def open_engine(ranks: Ranks, plan: Plan, split: Split, device: torch.device) -> tuple[Split, Engine]:
    """Return the split and the engine of a loop; all ranks call it.

    Args:
        ranks: the ranks.
        plan: of `plan_over_ranks`.
        split: splits the share of a rank.
        device: of the tensors.
    """
    if ranks.world == 1:
        return split, OneProcess()
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.after import After
    from autobatch.distributed.group import Group

    assert isinstance(ranks, Group)
    own = RankSplit(split, ranks.rank, [one.limit for one in plan.ranks])
    kinds = [one.kind for one in plan.ranks]
    return own, After(ranks, own, kinds, ranks.tensor_group(device))
