"""The plan of a batch over ranks, and the engine that a loop gets for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autobatch.core.records import DeviceRecord, Plan, Probe, SizeCut
from autobatch.distributed.engine import Engine, Filler, Shared, Whole
from autobatch.distributed.group import Group
from autobatch.distributed.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autobatch.distributed.sharding.model import ShardedModel
    from autobatch.step.train_state import TrainState


def agree_on_limit(
    ranks: Ranks, probe: Probe, planned: int, device: DeviceRecord
) -> tuple[Probe, int, str | None]:
    """Return the least limit of all ranks, which holds for all of them; all of them call it.

    Args:
        ranks: the processes that train together.
        probe: of this rank.
        planned: the largest micro-batch that a plan may ask for on this rank.
        device: of this rank.

    Returns:
        The probe of the rank with the least limit, what a plan may ask for on each rank, and a note that
        names the smallest GPU if the limits differ.
    """
    of_ranks = ranks.gather((probe, planned, f"{device.name} on {ranks.host}"))
    rank, (least, _, where) = min(enumerate(of_ranks), key=lambda item: item[1][0].micro_batch)
    largest = max(other.micro_batch for other, _, _ in of_ranks)
    note = (
        f"all ranks take micro-batches of at most {least.micro_batch:,}, as fit on rank {rank} ({where}), "
        f"although {largest:,} fit on others"
    )
    agreed = msgspec.structs.replace(least, world_size=ranks.world)
    return agreed, min(own for _, own, _ in of_ranks), note if least.micro_batch < largest else None


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


def shards_of(plan: Plan) -> int | None:
    """Return the number of ranks that share one model; None if each has a whole one."""
    return plan.world_size if plan.parallel == "shard" else None


def model_of_ranks(
    ranks: Ranks, plan: Plan, model: nn.Module, device: torch.device
) -> tuple[nn.Module, ShardedModel | None]:
    """Return the model that trains on the device of this rank; all ranks call it.

    Returns:
        The model itself and None if each rank has a whole one, else a copy that is sharded.

    Raises:
        InputError: the model cannot be sharded; the message says why.
    """
    if plan.parallel != "shard" or not isinstance(ranks, Group):
        return model.to(device), None
    # Only here: importing FSDP takes a second.
    from autobatch.distributed.sharding.build import shard_over

    return shard_over(ranks, model, plan.precision, device)


def open_engine(ranks: Ranks, train_state: TrainState, filler: Filler) -> Engine:
    """Return the engine of a loop, whose filler serves ranks with fewer micro-batches; all ranks call it."""
    if not isinstance(ranks, Group):
        return Engine()
    if train_state.shared is not None:
        return Shared(ranks, train_state, filler)
    engine = Whole(ranks, train_state)
    engine.broadcast([*train_state.model.parameters(), *train_state.model.buffers()])
    return engine
