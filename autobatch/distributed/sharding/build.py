"""Construction of a shared model: every rank takes its parts, and never the whole model on its device.

Rank 0 builds the model in host memory as one process would, with the same draws. The other ranks build it on
``meta``, without memory. After the sharding, rank 0 sends one parameter after the other, and every rank keeps
its part. So the run begins with the weights of one process with the same seed, bit for bit, and one host
holds one model. A model that does not fit in the host memory is never whole: every rank draws its parts with
``reset_parameters``, which gives other weights of the same distributions.
"""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autobatch.core.errors import InputError
from autobatch.core.records import Precision
from autobatch.device.oom import first_line
from autobatch.distributed.group import Group
from autobatch.distributed.sharding.checks import check_shapes
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.distributed.sharding.model import ShardedModel
from autobatch.step.tensors import local_part
from autobatch.workload.rng import seed_rank

RESETS = ("reset_parameters", "_reset_parameters", "init_weights")
"""Methods that give a module its first values; ``nn.MultiheadAttention`` has the second."""
PROBE_STD = 0.02
"""Standard deviation of weights whose values do not matter: finite, and small enough to stay so."""


def shard_over(
    group: Group,
    layout: ShardLayout,
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    *,
    keeps_model: bool = False,
) -> tuple[nn.Module, ShardedModel]:
    """Return a copy of a model that the ranks share, with the first weights of rank 0; all of them call it.

    The model itself is left without its weights unless it is kept, and only tells how to build a whole one.

    Args:
        group: the ranks.
        layout: what is gathered and reduced, and when.
        model: in host memory or on ``meta``; the values of rank 0 count, if it has any.
        precision: of the forward pass.
        device: of this rank.
        keeps_model: whether the model keeps its weights, for another copy.

    Raises:
        InputError: the model cannot be sharded, or has no values and a module cannot draw them.
    """
    whole = _tensors_of(model)
    must_draw = group.agree(group.rank == 0 and any(tensor.is_meta for tensor in whole.values()))
    if must_draw:
        check_resets(model)
    made = on_meta(model)
    sharded = layout.over(mesh_of(group, device))(made, precision)
    sharded.materialize(device)
    if must_draw:
        _draw(made, group.rank, device)
        return made, sharded
    with group.waiting("receive the first weights"), torch.no_grad():
        for name, tensor in _tensors_of(made).items():
            _send(whole[name] if group.rank == 0 else None, tensor, group, device)
            if not (keeps_model or whole[name].is_meta):
                # Its memory is free for the run.
                whole[name].data = whole[name].new_empty(0)
    return made, sharded


def mesh_of(group: Group, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks, over the process group of their tensors."""
    tensors = group.tensor_group(device)
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD if tensors is None else tensors, device.type)


def check_resets(model: nn.Module) -> None:
    """Check that every module with parameters or buffers of its own can give them their first values.

    Raises:
        InputError: one cannot.
    """
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not any(callable(getattr(module, one, None)) for one in RESETS):
            raise InputError(
                f"the model does not fit in the memory of the host, so each rank draws its part of the "
                f"weights, and {name or 'the model'} ({type(module).__name__}) has no reset_parameters(): "
                "add one, or give the host more memory"
            )


def fill(model: nn.Module) -> None:
    """Give the parameters of a model small values, for steps of which only the memory counts."""
    with torch.no_grad():
        for parameter in map(local_part, model.parameters()):
            if parameter.is_floating_point():
                parameter.normal_(0.0, PROBE_STD)
            else:
                parameter.zero_()


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors have no memory; ties are kept.

    Raises:
        InputError: a module of the user's cannot be copied, or has parameters without a shape.
    """
    check_shapes(model)
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"--parallel shard needs a model that copy.deepcopy can copy ({first_line(error)})"
        ) from error


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _draw(model: nn.Module, rank: int, device: torch.device) -> None:
    """Let each module draw its first values; on a GPU, DTensor gives each rank other numbers of one seed."""
    if device.type == "cpu":
        seed_rank(torch.initial_seed() % 2**31, rank)
    for module in model.modules():
        reset = next((found for one in RESETS if callable(found := getattr(module, one, None))), None)
        has_own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if has_own and reset is not None:
            with torch.no_grad(), warnings.catch_warnings():
                # On a CPU, DTensor warns that the seeds are up to us.
                warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
                reset()


def _send(whole: Tensor | None, target: Tensor, group: Group, device: torch.device) -> None:
    """Send a tensor of rank 0 to all ranks, each of which keeps its part."""
    # A buffer of its own, because the whole one may be a view of something larger.
    sent = torch.empty(target.shape, dtype=target.dtype, device=device)
    if group.rank == 0:
        assert whole is not None
        sent.copy_(whole)
    dist.broadcast(sent, 0, group=group.tensor_group(device))
    if isinstance(target, DTensor):
        part = target.placements[0]
        own = target.to_local()
        if own.numel():
            start = sum(_rows(target, rank) for rank in range(group.rank))
            own.copy_(sent.narrow(part.dim, start, own.shape[part.dim]))  # type: ignore[attr-defined]
    else:
        target.copy_(sent)


def _rows(target: DTensor, rank: int) -> int:
    """Return the rows of a parameter that a rank has (``torch.chunk``)."""
    rows, world = target.shape[0], target.device_mesh.size()
    each = -(-rows // world)
    return max(0, min(each, rows - each * rank))
