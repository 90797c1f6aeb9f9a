"""The sharded tensors of a checkpoint: each rank writes its parts, and any number of ranks read them.

torch.distributed.checkpoint (DCP) writes safetensors files of each rank and nothing else: the place of every
part is in the header of its file. Its own format would add a pickle.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded

from autobatch.core.errors import CheckpointError, DoesNotFitError
from autobatch.core.units import GiB
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.group import Group

FILE_BYTES = GiB
"""Bytes of a file, unless one tensor has more. A rank holds two copies of a file in host memory."""


class WholeTensor(Protocol):
    """A sharded tensor of a checkpoint, as its state describes it."""

    @property
    def shape(self) -> list[int]:
        """Return the shape of the whole tensor."""

    @property
    def dtype(self) -> str:
        """Return the name of its type in torch."""

    @property
    def dim(self) -> int | None:
        """Return the dimension that is cut over ranks; None if each rank has all of it."""


def write_shards(folder: Path, shards: Mapping[str, Tensor], group: Group) -> dict[str, dict[str, Any]]:
    """Write the parts of every rank, and flush them to the disk; all ranks call it.

    Args:
        folder: exists, and all ranks see it.
        shards: the same tensors on every rank.
        group: the ranks.

    Returns:
        Size in bytes and SHA-256 of the files of all ranks by name, as a manifest lists them.

    Raises:
        CheckpointError: a file could not be written, on every rank.
        DoesNotFitError: the host memory of a rank does not suffice, on every rank.
        RankLost: another rank ended.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files_of(shards, group.world), save_distributed=True
    )
    try:
        with group.waiting("write the checkpoint"):
            save(dict(shards), storage_writer=writer, process_group=group.tensor_group(torch.device("cpu")))
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda one: one[0])
        raise _clear_error(rank, folder, cause) from cause
    # The files of this rank begin with its number; DCP counts from 1.
    own: dict[str, dict[str, Any]] = {}
    reason = ""
    try:
        own = {path.name: _entry_of(path) for path in sorted(folder.glob(f"shard-{group.rank + 1:05d}-*"))}
    except OSError as error:
        reason = error.strerror or str(error)
    found = {}
    for rank, (files, failure) in enumerate(group.gather((own, reason))):
        if failure:
            raise CheckpointError(_failed(rank, folder, failure))
        found.update(files)
    return found


def read_shards(
    folder: Path,
    wanted: Mapping[str, WholeTensor],
    *,
    mesh: DeviceMesh | None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Read sharded tensors, whichever number of ranks wrote them; no rank waits for another.

    Args:
        folder: of the checkpoint.
        wanted: the tensors by name.
        mesh: the ranks that share them from now on; None for whole tensors, on the CPU.
        into: tensors to read into, by name; the others are new.

    Returns:
        The tensors by name.
    """
    found: dict[str, Tensor] = {}
    for name, one in wanted.items():
        target = (into or {}).get(name)
        is_fit = target is not None and list(target.shape) == one.shape
        found[name] = target.detach() if target is not None and is_fit else _empty(one, mesh)
    with warnings.catch_warnings():
        # It warns that ranks do not read together, which is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(dict(found), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            raise cause from None
    return found


def _empty(one: WholeTensor, mesh: DeviceMesh | None) -> Tensor:
    dtype = getattr(torch, one.dtype)
    if mesh is None:
        return torch.empty(one.shape, dtype=dtype, device="cpu")
    placement: Placement = Replicate() if one.dim is None else Shard(one.dim)
    return empty_sharded(*one.shape, dtype=dtype, device_mesh=mesh, placements=[placement])


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


def _entry_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _clear_error(rank: int, folder: Path, cause: BaseException) -> BaseException:
    if isinstance(cause, Exception) and is_oom(cause):
        return DoesNotFitError(
            f"rank {rank} ran out of host memory while it wrote its part of the checkpoint {folder}: "
            f"{first_line(cause).rstrip('.')}. Earlier checkpoints are intact. Free host memory and resume"
        )
    if isinstance(cause, OSError):
        return CheckpointError(_failed(rank, folder, cause.strerror or str(cause)))
    return cause


def _failed(rank: int, folder: Path, reason: str) -> str:
    return (
        f"rank {rank} could not write its part of the checkpoint to {folder}: {reason}. Free some space "
        "there; no earlier checkpoint is lost"
    )
