"""The plan of a batch over ranks, and the engine that a loop gets for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autobatch.core.records.device import DeviceRecord
from autobatch.core.records.plan import Plan, RankPlan
from autobatch.core.records.probe import RankLimit
from autobatch.distributed.engine import Engine
from autobatch.distributed.joint_split import JointSizeSplit
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.distributed.shares import Place, RankSplit, kinds_of, least_of_each_kind, shares
from autobatch.planning import micro_batches
from autobatch.workload.size_split import SizeSplit
from autobatch.workload.split import Split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from autobatch.distributed.sharding.model import ShardedModel
    from autobatch.step.train_state import TrainState
    from autobatch.workload.contract import Collated


def limits_over_ranks(ranks: Ranks, limit: int, device: DeviceRecord) -> list[RankLimit]:
    """Return the limit of each rank, the least of its kind; all of them call it.

    Args:
        ranks: the ranks.
        limit: the largest micro-batch that fits on this rank.
        device: the device of this rank.
    """
    found = ranks.gather([ranks.host, device.name, device.total_bytes, device.budget_bytes, limit])
    kinds = kinds_of([Place(*one[1:4]) for one in found])
    limits = least_of_each_kind([one[4] for one in found], kinds)
    return [
        RankLimit(rank=rank, host=one[0], device=one[1], kind=kinds[rank], limit=limits[rank])
        for rank, one in enumerate(found)
    ]


def spread(plan: Plan, limits: Sequence[RankLimit], layout: ShardLayout | None = None) -> Plan:
    """Return the plan of one process, spread over all ranks.

    Args:
        plan: the plan as one process would run it.
        limits: of all ranks.
        layout: the model that the ranks share; None if each has a whole one.
    """
    unit = plan.multiple
    in_units = shares(plan.target_batch // unit, [max(1, one.limit // unit) for one in limits])
    of_ranks = [
        RankPlan(
            **{name: getattr(one, name) for name in RankLimit.__struct_fields__},
            samples=samples,
            micro_batches=micro_batches(samples, one.limit, plan.multiple),
        )
        for one, samples in zip(limits, [unit * one for one in in_units], strict=True)
    ]
    first = of_ranks[0].micro_batches
    return msgspec.structs.replace(
        plan,
        world_size=len(of_ranks),
        ranks=of_ranks,
        micro_batch=max(first, default=0),
        accumulation_steps=len(first),
        micro_batches=first,
        parallel="replicate" if layout is None else "shard",
        shard_sync=None if layout is None else layout.sync,
        shard_modules=None if layout is None else layout.modules,
    )


def limit_of_rank(ranks: Ranks, plan: Plan) -> int:
    """Return the largest micro-batch of this rank in a plan, of samples of any size."""
    if plan.size_cut is not None:
        return max(plan.size_cut.micro_batches)
    return plan.ranks[ranks.rank].limit if plan.ranks else plan.micro_batch


def share_of_rank(ranks: Ranks, plan: Plan, samples: int) -> int:
    """Return the samples that this rank takes of a batch of this size."""
    return shares(samples, [one.limit for one in plan.ranks])[ranks.rank] if plan.ranks else samples


def split_of_rank(ranks: Ranks, plan: Plan, split: Split) -> Split:
    """Return the split of this rank, which splits its share as ``split`` would a whole batch."""
    if ranks.world == 1:
        return split
    if isinstance(split, SizeSplit):
        return JointSizeSplit(split, ranks.rank, [split.largest] * ranks.world)
    return RankSplit(split, ranks.rank, [one.limit for one in plan.ranks])


def layout_of(plan: Plan) -> ShardLayout | None:
    """Return what ranks gather and reduce of a model that they share; None if each has a whole one."""
    if plan.parallel != "shard":
        return None
    return ShardLayout(world=plan.world_size, sync=plan.shard_sync or "each", modules=plan.shard_modules)


def model_of_ranks(
    ranks: Ranks, plan: Plan, model: nn.Module, device: torch.device
) -> tuple[nn.Module, ShardedModel | None]:
    """Return the model that trains on the device of this rank; all ranks call it.

    Returns:
        The model itself and None if each rank has a whole one, else a copy that the ranks share.

    Raises:
        InputError: the model cannot be sharded; the message says why.
    """
    layout = layout_of(plan)
    if layout is None:
        return model.to(device), None
    # Only here: importing FSDP takes a second.
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.build import shard_over

    assert isinstance(ranks, Group)
    return shard_over(ranks, layout, model, plan.precision, device)


def open_engine(
    ranks: Ranks,
    plan: Plan,
    split: Split,
    train_state: TrainState,
    spare: Callable[[], tuple[Collated, int]],
) -> Engine:
    """Return the engine of a loop; all ranks call it.

    Args:
        ranks: the ranks.
        plan: of `spread`, if several ranks run.
        split: of `split_of_rank`.
        train_state: what trains.
        spare: returns a small micro-batch on the device, with its samples.
    """
    if ranks.world == 1:
        return Engine()
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.group import Group
    from autobatch.distributed.replicate import Replicate

    assert isinstance(ranks, Group)
    assert isinstance(split, RankSplit)
    kinds = [one.kind for one in plan.ranks]
    if train_state.shared is None:
        return Replicate(ranks, split, kinds, train_state, spare)
    from autobatch.distributed.sharding.engine import Shard

    return Shard(ranks, split, kinds, train_state, spare)
