"""Construction of a sharded model: every rank takes its shards, and never the whole model on its device.

Rank 0 builds the model in host memory as one process would, with the same draws. The other ranks build it on
``meta``, without memory. After the sharding, rank 0 sends one tensor after the other, and every rank keeps
its shard. So the run begins with the weights of one process with the same seed, bit for bit, and one host
holds one model.

A process that predicts or tries the steps of one rank has no others beside it. It gets a process group that
exchanges nothing, under which a rank allocates the same as beside real ranks. In place of the shards of other
ranks it uses its own, so that all values are finite and a loss can be computed from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from autobatch.core.errors import InputError
from autobatch.core.records import Precision
from autobatch.device.oom import first_line
from autobatch.distributed.group import Group
from autobatch.distributed.sharding.model import ShardedModel, Sharding
from autobatch.step.gradients import local_parts

ALONE = ("alone",)
"""Name of the dimension of a mesh without real ranks. DTensor takes meshes of one name and size for one mesh,
and would ask the ranks of the wrong group."""
PROBE_STD = 0.02
"""Standard deviation of weights whose values do not matter: finite, and small enough to stay so."""


def shard_over(
    group: Group, model: nn.Module, precision: Precision, device: torch.device
) -> tuple[nn.Module, ShardedModel]:
    """Return a copy of a model that the ranks share, with the first weights of rank 0; all of them call it.

    The model itself is left without its weights, and only tells how to build a whole one.

    Args:
        group: the ranks.
        model: in host memory on rank 0, which has the values; there or on ``meta`` on the others.
        precision: of the forward pass.
        device: of this rank.

    Raises:
        InputError: the model cannot be sharded.
    """
    tensors = group.tensor_group(device)
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD if tensors is None else tensors, device.type)
    made = on_meta(model)
    sharded = Sharding(mesh)(made, precision)
    materialize(made, device)
    with group.waiting("receive the first weights"), torch.no_grad():
        set_model_state_dict(
            made,
            model.state_dict() if group.rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        for whole, buffer in zip(model.buffers(), made.buffers(), strict=True):
            # No checkpoint keeps some of them.
            buffer.copy_(whole if group.rank == 0 else buffer)
            dist.broadcast(buffer, 0, group=tensors)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.new_empty(0)  # its memory is free for the run
    return made, sharded


def sharded_copy(
    model: nn.Module, sharding: Sharding, precision: Precision, device: torch.device
) -> tuple[nn.Module, ShardedModel]:
    """Return a copy of a model with the parts of one rank on its device; their values are not the model's.

    Args:
        model: on ``meta`` or in host memory; left unchanged.
        sharding: of `sharding_alone`.
        precision: of the forward pass.
        device: of the rank.

    Raises:
        InputError: the model cannot be sharded.
    """
    made = on_meta(model)
    sharded = sharding(made, precision)
    materialize(made, device)
    for part in sharded.parts():
        # Of real ranks the sums would arrive. The backend "fake" gathers copies of the part of this rank.
        part.set_custom_reduce_scatter(_OwnSum())  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in local_parts([*made.parameters()]):
            if parameter.is_floating_point():
                parameter.normal_(0.0, PROBE_STD)
            else:
                parameter.zero_()
    return made, sharded


@contextmanager
def fake_ranks(world: int) -> Iterator[Sharding]:
    """Act as rank 0 of ``world`` within the block. Rank 0 has the largest shard of every parameter.

    What torch keeps of a mesh outlives the group, so a process that may train over real ranks later opens
    this in a child.

    Raises:
        InputError: this process is a rank of a real group already.
    """
    if dist.is_initialized():
        raise InputError(
            f"--ranks {world} predicts a rank in a process of its own, and this process has a process group "
            "already: call torch.distributed.destroy_process_group() first, or run autobatch estimate"
        )
    try:
        yield sharding_alone(world, "cpu")
    finally:
        dist.destroy_process_group()


def sharding_alone(world: int, device_type: str) -> Sharding:
    """Return the sharding of a process that runs the steps of a rank, and exchanges nothing until its end.

    A process without a group becomes rank 0. A rank of a real group keeps its place, and all ranks of it call
    this together.
    """
    # Importing this registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        group = dist.new_group(backend="fake")
        return Sharding(DeviceMesh.from_group(group, device_type, mesh_dim_names=ALONE))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return Sharding(init_device_mesh(device_type, (world,), mesh_dim_names=ALONE))


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors have no memory; ties are kept.

    Raises:
        InputError: a module of the user's cannot be copied, or has parameters without a shape.
    """
    try:
        memo: dict[int, object] = {
            id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        memo |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"--parallel shard needs a model that copy.deepcopy can copy ({first_line(error)})"
        ) from error


def materialize(model: nn.Module, device: torch.device) -> None:
    """Take memory for the parts of this rank of tensors on ``meta``: any parameters, and buffers of 0."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        own: list[Mapping[str, Tensor | None]] = [module._parameters, module._buffers]
        for name, tensor in [item for registry in own for item in registry.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in made:  # tied ones stay one
                made[tensor] = torch.zeros_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    made[tensor] = nn.Parameter(made[tensor], requires_grad=tensor.requires_grad)
            setattr(module, name, made[tensor])
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # it looks for new parameters then


class _OwnSum:
    """A reduce-scatter that takes the gradient of this rank for the sum."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory, as FSDP's own collective does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Fill the output."""
        del op, async_op
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])
