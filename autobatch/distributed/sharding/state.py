"""The state of a sharded model: whole tensors cut into its parts, and parts gathered into whole weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autobatch.step.train_state import TrainState


def shard_like(train_state: TrainState, state: Any, mesh: DeviceMesh) -> Any:
    """Shard the whole tensors of a state as the parameters that they belong to; each rank keeps its parts."""
    owners = _owners(train_state)

    def cut(place: str, leaf: Any) -> Any:
        owner = owners.get(place, owners.get(place.rpartition("/")[0]))
        if not isinstance(owner, DTensor) or not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return leaf
        if not leaf.dim():  # numbers of steps
            return leaf
        placements = owner.placements if leaf.shape == owner.shape else [Replicate()]
        return distribute_tensor(leaf, mesh, placements, src_data_rank=None)

    return map_leaves(state, cut)


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
    found: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    # With the parameters themselves, which tell tied ones.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in known and isinstance(value, DTensor):
            whole = value.full_tensor()
            # A copy: what was gathered may have the padding of the last part.
            known[id(value)] = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
        if keep:
            found[name] = known.get(id(value), value.detach() if isinstance(value, Tensor) else value)
    return found


def map_leaves(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """Return nested containers with each leaf changed; those in which nothing changes are kept.

    Args:
        value: dicts, lists and tuples of leaves.
        change: receives the place of a leaf, which are the keys joined by slashes, and the leaf.
        place: of the value.
    """

    def inner(key: object, item: Any) -> Any:
        return map_leaves(item, change, f"{place}/{key}" if place else str(key))

    if isinstance(value, dict):
        changed = {key: inner(key, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        # The state dict of a model has attributes.
        copied = copy.copy(value)
        copied.update(changed)
        return copied
    if type(value) in (list, tuple):
        items = [inner(number, item) for number, item in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return change(place, value)


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
