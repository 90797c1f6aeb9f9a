"""The plan of a batch over ranks, and the engine that a loop gets for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from autobatch.core.records import DeviceRecord, Plan, RankLimit, RankPlan, SizeCut
from autobatch.distributed.engine import Engine, Filler, Replicate, Shard
from autobatch.distributed.group import Group
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import micro_batches, split_over_ranks
from autobatch.workload.split import SizeSplit, Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from autobatch.distributed.sharding.model import ShardedModel
    from autobatch.step.train_state import TrainState
    from autobatch.workload.split import Sizes

CLOSE_BUDGETS = 0.02
"""Relative difference of the budgets of two GPUs of one kind."""


def limits_over_ranks(ranks: Ranks, limit: int, device: DeviceRecord) -> list[RankLimit]:
    """Return the limit of each rank, the least of its kind; all of them call it with their own."""
    found = ranks.gather((ranks.host, device, limit))
    kinds = _kinds_of([device for _, device, _ in found])
    return [
        RankLimit(
            rank=rank,
            host=host,
            device=device.name,
            kind=kinds[rank],
            limit=min(limit for kind, (*_, limit) in zip(kinds, found, strict=True) if kind == kinds[rank]),
        )
        for rank, (host, device, _) in enumerate(found)
    ]


def spread(plan: Plan, limits: Sequence[RankLimit], layout: ShardLayout | None = None) -> Plan:
    """Return the plan of one process, spread over all ranks; the layout is that of a sharded model."""
    samples_of = split_over_ranks(plan.target_batch, [one.limit for one in limits], plan.multiple)
    of_ranks = [
        RankPlan(
            **{name: getattr(one, name) for name in RankLimit.__struct_fields__},
            samples=samples,
            micro_batches=micro_batches(samples, one.limit, plan.multiple),
        )
        for one, samples in zip(limits, samples_of, strict=True)
    ]
    first = of_ranks[0].micro_batches
    whole = ("replicate", None, None)
    parallel, sync, modules = whole if layout is None else ("shard", layout.sync, layout.modules)
    return msgspec.structs.replace(
        plan,
        world_size=len(of_ranks),
        ranks=of_ranks,
        micro_batch=max(first, default=0),
        accumulation_steps=len(first),
        micro_batches=first,
        parallel=parallel,
        shard_sync=sync,
        shard_modules=modules,
    )


def limit_of_rank(ranks: Ranks, plan: Plan) -> int:
    """Return the largest micro-batch of this rank in a plan, of samples of any size."""
    if plan.size_cut is not None:
        return plan.size_cut.max_micro_batch
    return plan.ranks[ranks.rank].limit if plan.ranks else plan.micro_batch


def share_of_rank(ranks: Ranks, plan: Plan, samples: int) -> int:
    """Return the samples that this rank takes of a batch of this size."""
    limits = [one.limit for one in plan.ranks]
    return split_over_ranks(samples, limits, plan.multiple)[ranks.rank] if limits else samples


def agree_on_cut(ranks: Ranks, cut: SizeCut | None) -> SizeCut | None:
    """Return the cut with the least limits of any rank; all of them call it.

    None if a rank splits by count, or has other samples.
    """
    cuts = [known for known in ranks.gather(cut) if known is not None]
    if len(cuts) < ranks.world or len({known.digest for known in cuts}) > 1:
        return None
    return msgspec.structs.replace(
        cuts[0],
        micro_batch=min(known.micro_batch for known in cuts),
        max_micro_batch=min(known.max_micro_batch for known in cuts),
    )


def split_for(ranks: Ranks, plan: Plan, sizes: Sizes | None) -> Split:
    """Return the split of this rank; the sizes of samples are needed if the plan cuts by size."""
    if plan.size_cut is None or sizes is None:
        return Split(ranks.rank, [one.limit for one in plan.ranks], plan.multiple)
    return SizeSplit(
        sizes=sizes,
        cut=plan.size_cut,
        rank=ranks.rank,
        limits=[plan.size_cut.max_micro_batch] * ranks.world,
    )


def layout_of(plan: Plan) -> ShardLayout | None:
    """Return the layout of a sharded model; None if each rank has a whole one."""
    if plan.parallel != "shard":
        return None
    return ShardLayout(world=plan.world_size, sync=plan.shard_sync or "each", modules=plan.shard_modules)


def model_of_ranks(
    ranks: Ranks, plan: Plan, model: nn.Module, device: torch.device
) -> tuple[nn.Module, ShardedModel | None]:
    """Return the model that trains on the device of this rank; all ranks call it.

    Returns:
        The model itself and None if each rank has a whole one, else a copy that is sharded.

    Raises:
        InputError: the model cannot be sharded; the message says why.
    """
    layout = layout_of(plan)
    if layout is None or not isinstance(ranks, Group):
        return model.to(device), None
    # Only here: importing FSDP takes a second.
    from autobatch.distributed.sharding.build import shard_over

    return shard_over(ranks, layout, model, plan.precision, device)


def open_engine(ranks: Ranks, plan: Plan, split: Split, train_state: TrainState, filler: Filler) -> Engine:
    """Return the engine of a loop, whose filler serves ranks with fewer micro-batches; all ranks call it."""
    if not isinstance(ranks, Group):
        return Engine()
    engine = Replicate if train_state.shared is None else Shard
    return engine(ranks, split, [one.kind for one in plan.ranks], train_state, filler)


def _kinds_of(devices: Sequence[DeviceRecord]) -> list[int]:
    """Return the kind of each rank, named by the first rank of it: one device, and close budgets."""
    kinds: list[int] = []
    for rank, device in enumerate(devices):
        alike = (kind for kind in dict.fromkeys(kinds) if _are_alike(devices[kind], device))
        kinds.append(next(alike, rank))
    return kinds


def _are_alike(one: DeviceRecord, other: DeviceRecord) -> bool:
    is_same = (one.name, one.total_bytes) == (other.name, other.total_bytes)
    return is_same and math.isclose(one.budget_bytes, other.budget_bytes, rel_tol=CLOSE_BUDGETS)
