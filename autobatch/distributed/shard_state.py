"""The state of a sharded model: whole weights of its shards, and checkpoints that ranks write together.

torch.distributed.checkpoint (DCP) writes safetensors files of each rank and nothing else: the place of every
shard is in the header of its file. Its own format would add a pickle. Any number of ranks read them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded

from autobatch.core.errors import CheckpointError
from autobatch.core.files import file_entry
from autobatch.core.units import GiB
from autobatch.device.oom import first_line
from autobatch.distributed.group import Group

FILE_BYTES = GiB
"""Bytes of a file, unless one tensor has more. A rank holds two copies of a file in host memory."""
WholeTensor = tuple[list[int], torch.dtype, int | None]
"""Shape and type of a sharded tensor, and the dimension that is cut; None if each rank has all of it."""


def write_shards(folder: Path, shards: Mapping[str, Tensor], group: Group) -> dict[str, dict[str, Any]]:
    """Write the parts of every rank, and flush them to the disk; all ranks call it.

    Args:
        folder: exists, and all ranks see it.
        shards: the same tensors on every rank.
        group: the ranks.

    Returns:
        Size in bytes and SHA-256 of the files of all ranks by name, as a manifest lists them.

    Raises:
        CheckpointError: a rank could not write its part, on every rank.
        RankLost: another rank ended.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files_of(shards, group.world), save_distributed=True
    )
    failure, own = "", dict[str, dict[str, Any]]()
    try:
        with group.waiting("write the checkpoint"):
            save(
                dict(shards),
                storage_writer=writer,
                process_group=group.tensor_group(torch.device("cpu")),
            )
        # The files of this rank begin with its number; DCP counts from 1.
        own = {path.name: file_entry(path) for path in sorted(folder.glob(f"shard-{group.rank + 1:05d}-*"))}
    except (CheckpointException, OSError) as error:
        cause = _cause_of(error)
        if not isinstance(cause, Exception):  # a signal
            raise cause from None
        failure = first_line(cause)
    files = dict[str, dict[str, Any]]()
    for rank, (of_rank, reason) in enumerate(group.gather((own, failure))):
        if reason:
            raise CheckpointError(
                f"rank {rank} could not write its part of the checkpoint to {folder}: {reason}. Free some "
                "space there; no earlier checkpoint is lost"
            )
        files.update(of_rank)
    return files


def read_shards(
    folder: Path,
    wanted: Mapping[str, WholeTensor],
    model: nn.Module,
    mesh: DeviceMesh | None,
) -> dict[str, Tensor]:
    """Read sharded tensors, whichever number of ranks wrote them; no rank waits for another.

    Args:
        folder: of the checkpoint.
        wanted: the tensors by name.
        model: has the weights, of which the sharded ones are read in place; the other tensors are new.
        mesh: the ranks that share them from now on; None for whole tensors, on the CPU.

    Returns:
        The tensors by name.
    """
    weights = {f"model/{name}": value for name, value in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype, dim) in wanted.items():
        own = weights.get(name)
        if isinstance(own, DTensor) and list(own.shape) == shape:
            tensors[name] = own.detach()
        elif mesh is None:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            placements = [Replicate() if dim is None else Shard(dim)]
            tensors[name] = empty_sharded(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    with warnings.catch_warnings():
        # It warns that ranks do not read together, which is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:
            raise _cause_of(error) from None
    return tensors


def _cause_of(error: BaseException) -> BaseException:
    """Return the first failure of a rank that DCP reports, or the error itself."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


@torch.no_grad()
def gather_weights(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the state dict of a sharded model with whole tensors on the CPU; all ranks call it.

    One tensor at a time is whole on the device.

    Args:
        model: the model.
        keep: False on ranks that do not need it, which get an empty one.
    """
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    # With the parameters themselves, which tell tied ones.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in known and isinstance(value, DTensor):
            whole = value.full_tensor()
            # A copy: what was gathered may have the padding of the last part.
            known[id(value)] = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
        if keep:
            state[name] = known.get(id(value), value.detach() if isinstance(value, Tensor) else value)
    return state


def _files_of(shards: Mapping[str, Tensor], world: int) -> dict[str, int]:
    """Number the files of a rank from 1, and give every tensor one of them; the same on every rank."""
    files, number, used = {}, 1, 0
    for name, shard in shards.items():
        size = -(-shard.numel() * shard.dtype.itemsize // world)
        if used and used + size > FILE_BYTES:
            number, used = number + 1, 0
        files[name] = number
        used += size
    return files
