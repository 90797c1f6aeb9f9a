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
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_sharded

from autobatch.core.errors import CheckpointError, DoesNotFitError
from autobatch.core.files import file_entry
from autobatch.core.units import GiB
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.group import Group
from autobatch.step.train_state import TrainState
from autobatch.workload.nested import map_leaves

FILE_BYTES = GiB
"""Bytes of a file, unless one tensor has more. A rank holds two copies of a file in host memory."""
_SHARDED = ("model", "average", "optimizers")
"""Parts of a state that have a tensor for each parameter."""
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
        CheckpointError: a file could not be written, on every rank.
        DoesNotFitError: the host memory of a rank does not suffice, on every rank.
        RankLost: another rank ended.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files_of(shards, group.world), save_distributed=True
    )
    process_group = group.tensor_group(torch.device("cpu"))
    try:
        with group.waiting("write the checkpoint"):
            save(dict(shards), storage_writer=writer, process_group=process_group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda one: one[0])
        raise _clear_error(rank, folder, cause) from cause
    # The files of this rank begin with its number; DCP counts from 1.
    own: dict[str, dict[str, Any]] = {}
    reason = ""
    try:
        own = {path.name: file_entry(path) for path in sorted(folder.glob(f"shard-{group.rank + 1:05d}-*"))}
    except OSError as error:
        reason = error.strerror or str(error)
    of_all = {}
    for rank, (files, failure) in enumerate(group.gather((own, reason))):
        if failure:
            raise CheckpointError(_failed(rank, folder, failure))
        of_all.update(files)
    return of_all


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
    tensors: dict[str, Tensor] = {}
    for name, form in wanted.items():
        target = (into or {}).get(name)
        is_fit = target is not None and list(target.shape) == form[0]
        tensors[name] = target.detach() if target is not None and is_fit else _empty(form, mesh)
    with warnings.catch_warnings():
        # It warns that ranks do not read together, which is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            raise cause from None
    return tensors


def shard_like(train_state: TrainState, state: Any, mesh: DeviceMesh) -> Any:
    """Shard the whole tensors of a state as their parameters; each rank keeps its shards."""
    owners = _owners(train_state)

    def cut(place: str, leaf: Any) -> Any:
        owner = owners.get(place, owners.get(place.rpartition("/")[0]))
        if not isinstance(owner, DTensor) or not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return leaf
        if not leaf.dim():  # numbers of steps
            return leaf
        placements = owner.placements if leaf.shape == owner.shape else [Replicate()]
        return distribute_tensor(leaf, mesh, placements, src_data_rank=None)

    return {**state, **{name: map_leaves(state[name], cut, name) for name in _SHARDED}}


def sharded_parameters(train_state: TrainState) -> dict[str, Tensor]:
    """Return the sharded tensors of a model by their names in a checkpoint."""
    own = train_state.model.state_dict()
    return {f"model/{name}": value for name, value in own.items() if isinstance(value, DTensor)}


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


def _empty(form: WholeTensor, mesh: DeviceMesh | None) -> Tensor:
    shape, dtype, dim = form
    if mesh is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    placement: Placement = Replicate() if dim is None else Shard(dim)
    return empty_sharded(*shape, dtype=dtype, device_mesh=mesh, placements=[placement])


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


def _owners(train_state: TrainState) -> dict[str, Tensor]:
    """Return the parameter that each tensor of a state belongs to, by its place or the place around it."""
    owners = sharded_parameters(train_state)
    for number, parameter in enumerate(train_state.parameters):
        owners[f"average/averages/{number}"] = parameter
    for place, optimizer in enumerate(train_state.optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            owners[f"optimizers/{place}/state/{number}"] = parameter
    return owners
