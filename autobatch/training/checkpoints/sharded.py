"""Checkpoints of parameters that are sharded over ranks: all ranks write, rank 0 publishes.

    rank 0: step-N.tmp-PID ──► all: their parts, flushed and summed ──► rank 0: state, manifest, step-N

No rank continues before the folder has its name. If one fails, all of them do, and earlier checkpoints are
intact. A checkpoint of shards is read by any number of ranks, sharded or not, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autobatch.core.errors import CheckpointError, DoesNotFitError
from autobatch.training.checkpoints.checkpoint import (
    begin_checkpoint,
    discard_checkpoint,
    prune,
    publish_checkpoint,
)
from autobatch.training.loop import Loop

SHARDED = "sharded"
"""Entry of a state that tells about the tensors that are in files of their own; None if there are none."""


def save_sharded(
    loop: Loop,
    folder: Path,
    *,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    keep_last: int = 3,
    protected: Path | None = None,
) -> Path:
    """Write a checkpoint as `checkpoints.checkpoint.save_checkpoint` does; all ranks call it.

    Raises:
        CheckpointError: a rank could not write its part, on every rank.
        DoesNotFitError: the host memory of a rank does not suffice, on every rank.
    """
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.files import write_shards
    from autobatch.distributed.sharding.state import separate

    ranks = loop.engine.ranks
    assert isinstance(ranks, Group)
    rest, shards, notes = separate(dict(state))
    temporary = Path(ranks.once(lambda: str(begin_checkpoint(folder, loop.batches_seen))))
    try:
        files = write_shards(temporary, shards, ranks)
    except (CheckpointError, DoesNotFitError):
        ranks.once(lambda: discard_checkpoint(temporary))
        raise

    def publish() -> str:
        path = publish_checkpoint(temporary, state={**rest, SHARDED: notes}, facts=facts, files=files)
        prune(path, keep_last=keep_last, protected=protected)
        return str(path)

    return Path(ranks.once(publish))


def with_shards(loop: Loop, state: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Return a state of a checkpoint with all of its tensors, sharded as those of the loop.

    Args:
        loop: the loop that is going to be restored.
        state: of the checkpoint.
        folder: of the checkpoint; None if the state has all tensors.
    """
    notes, mesh = state.get(SHARDED), loop.engine.mesh
    if notes is None and mesh is None:
        return state
    from autobatch.distributed.sharding.files import read_shards
    from autobatch.distributed.sharding.state import fill, shard_like, sharded_parameters

    if notes is not None:
        assert folder is not None
        # The weights are read in place.
        into = sharded_parameters(loop.train_state)
        state = fill(state, read_shards(folder, notes, mesh=mesh, into=into))
    return state if mesh is None else shard_like(loop.train_state, state, mesh)


def sharded_bytes(loop: Loop, state: Mapping[str, Any]) -> int:
    """Return the bytes that the sharded tensors of a checkpoint take in the loop of this rank."""
    notes = [note for place, note in (state.get(SHARDED) or {}).items() if note["kept_at"] == place]
    whole: int = sum(math.prod(note["shape"]) * getattr(torch, note["dtype"]).itemsize for note in notes)
    return whole if loop.engine.mesh is None else -(-whole // loop.engine.ranks.world)
