"""The parts of a rank in a run: its limit, its samples of a batch, its model, its engine and its stream.

Rank 0 reads a stream for all ranks, so that they train on the samples of one process. It sends each batch
whole. A batch that runs again in other shares, or is split by size, needs no further message. The samples are
read as tensors and plain values.
"""

from __future__ import annotations

import _codecs
import hashlib
import io
import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from autobatch.core.errors import InputError
from autobatch.core.records import DeviceRecord, Plan, RankLimit, RankPlan, SizeCut
from autobatch.distributed.engine import Engine, Filler, Replicate, Shard
from autobatch.distributed.group import Group
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import micro_batches, split_over_ranks
from autobatch.workload.nested import map_tensors
from autobatch.workload.split import SizeSplit, Split
from autobatch.workload.streams import SCAN, StreamView

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        return max(plan.size_cut.micro_batches)
    return plan.ranks[ranks.rank].limit if plan.ranks else plan.micro_batch


def share_of_rank(ranks: Ranks, plan: Plan, samples: int) -> int:
    """Return the samples that this rank takes of a batch of this size."""
    limits = [one.limit for one in plan.ranks]
    return split_over_ranks(samples, limits, plan.multiple)[ranks.rank] if limits else samples


def agree_on_cut(ranks: Ranks, cut: SizeCut | None) -> SizeCut | None:
    """Return the least limit of any rank for every size; all of them call it.

    None if a rank splits by count, or has other samples.
    """
    cuts = [one for one in ranks.gather(cut) if one is not None]
    if len(cuts) < ranks.world or len({one.digest for one in cuts}) > 1:
        return None
    knots = sorted({size for one in cuts for size in one.sizes})
    # The limit of a cut for samples up to a size is that of its next knot.
    least = [
        min(one.micro_batches[min(bisect_left(one.sizes, size), len(one.sizes) - 1)] for one in cuts)
        for size in knots
    ]
    return msgspec.structs.replace(cuts[0], sizes=knots, micro_batches=least)


def split_for(ranks: Ranks, plan: Plan, sizes: Sizes | None, measured_every: int | None) -> Split:
    """Return the split of this rank; the sizes of samples are needed if the plan cuts by size."""
    if plan.size_cut is None or sizes is None:
        return Split(ranks.rank, [one.limit for one in plan.ranks], plan.multiple)
    return SizeSplit(
        sizes=sizes,
        cut=plan.size_cut,
        measured_every=measured_every,
        rank=ranks.rank,
        limits=[max(plan.size_cut.micro_batches)] * ranks.world,
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


class SharedStream(StreamView):
    """A stream as data with an index that only moves forward, on every rank.

    Args:
        stream: the user's data; read on rank 0 alone.
        ranks: the ranks.
        seed: of the run.
        target_batch: samples that a `BatchFunction` is asked for.
    """

    def __init__(self, stream: Any, ranks: Ranks, seed: int = 0, target_batch: int = SCAN) -> None:
        super().__init__(stream, seed, target_batch)
        self._ranks = ranks

    def begin_batch(self, first: int, stop: int) -> None:
        """Send the samples of a batch from rank 0 to all; all ranks call it."""
        super().begin_batch(first, stop)
        own = b"" if self._ranks.rank else pack(self.__getitems__(range(first, stop)))
        content = self._ranks.broadcast(own)
        if self._ranks.rank:
            self._held = dict(zip(range(first, stop), unpack(content), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `StreamView.load_state_dict`."""
        return "rank 0 reads the stream" if self._ranks.rank else super().load_state_dict(state)


def open_stream(stream: Any, ranks: Ranks, seed: int, target_batch: int) -> StreamView:
    """Return a stream as data with an index, which all ranks of a run with this seed read together."""
    if ranks.world == 1:
        return StreamView(stream, seed, target_batch)
    return SharedStream(stream, ranks, seed, target_batch)


def split_note(first_sample: Any, ranks: Ranks) -> str | None:
    """Return a remark if the stream of each rank begins with another sample; all ranks call it."""
    if len(set(ranks.gather(hashlib.sha256(pack(first_sample)).hexdigest()))) == 1:
        return None
    return (
        "the stream begins with another sample on each rank. Rank 0 reads it for all ranks, so it must not "
        "be split by rank, or only the part of rank 0 is trained"
    )


def pack(samples: Any) -> bytes:
    """Return samples as bytes for `unpack`, without the memory that a tensor is a part of.

    Raises:
        InputError: they hold something else than tensors, arrays and plain values.
    """
    file = io.BytesIO()
    torch.save(map_tensors(samples, _compact), file)
    file.seek(0)
    with safe_globals(_numpy_globals()):
        foreign = sorted(get_unsafe_globals_in_checkpoint(file))
    if foreign:
        raise InputError(
            "rank 0 sends the samples of a stream to the other ranks as tensors, NumPy arrays, numbers, text "
            f"and bytes in dicts, lists and tuples, found {foreign[0]}: convert it where the stream yields it"
        )
    return file.getvalue()


def unpack(content: bytes) -> Any:
    """Return samples from their bytes."""
    with safe_globals(_numpy_globals()):
        return torch.load(io.BytesIO(content), weights_only=True)


def _numpy_globals() -> list[Any]:
    """Return the functions and classes that make arrays, beside those that torch allows by itself."""
    kinds = [type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"]
    makers = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [np.ndarray, np.dtype, _codecs.encode, *makers, *dict.fromkeys(kinds)]


def _compact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


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
