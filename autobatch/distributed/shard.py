"""A model whose parameters, gradients and optimizer state are sharded over ranks by FSDP2.

The repeated blocks of a model are sharded one by one, and everything else with the loss, which is the root.
The root is the loss and not the model, because a loss may call any method of a model. Each rank holds one
part of every parameter. A block is gathered before its forward and its backward pass, and freed after each.
The rest is gathered before a forward pass and freed after its backward pass.

Ranks sum their gradients and do not average them: one divisor for the whole batch is in the loss already
(`autobatch.step.train_step`). In 16 bits the weights of blocks are gathered in 16 bits, and autocast runs the
rest; parameters and sums of gradients stay in float32.

Rank 0 builds the model in host memory as one process would, with the same draws. The other ranks build it on
``meta``, without memory. After the sharding, rank 0 sends one tensor after the other, and every rank keeps
its shard. So the run begins with the weights of one process with the same seed, bit for bit, one host holds
one model, and no device a whole one.

A process that predicts or tries the steps of one rank has no others beside it. It gets a process group that
exchanges nothing, under which a rank allocates the same as beside real ranks. In place of the shards of other
ranks it uses its own, so that all values are finite and a loss can be computed from them.

Ranks write checkpoints together: torch.distributed.checkpoint (DCP) writes safetensors files of each rank and
nothing else, with the place of every shard in the header of its file. Its own format would add a pickle. Any
number of ranks read them.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.files import file_entry
from autobatch.core.records import Precision
from autobatch.core.units import GiB
from autobatch.device.oom import first_line
from autobatch.distributed.group import Group
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.gradients import local_parts, low_precision_parameters
from autobatch.step.train_state import AUTOCAST_DTYPES, TrainState
from autobatch.workload.contract import Collated

T = TypeVar("T")
ALONE = ("alone",)
"""Name of the dimension of a mesh without real ranks. DTensor takes meshes of one name and size for one mesh,
and would ask the ranks of the wrong group."""
PROBE_STD = 0.02
"""Standard deviation of weights whose values do not matter: finite, and small enough to stay so."""


def check_sharding(model: nn.Module, precision: Precision) -> None:
    """Check that FSDP2 can share a model, in the user's words.

    Raises:
        InputError: it cannot; the message says why.
    """
    trained = {p.dtype: f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.requires_grad}
    wrong = [f"has parameters of several types ({', '.join(trained.values())})"] if len(trained) > 1 else []
    wrong += [
        f"has {name}, a parameter without a dimension: give it the shape (1,)"
        for name, parameter in model.named_parameters()
        if not parameter.dim()
    ]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            wrong.append(f"has a sparse gradient, of {name}: use sparse=False")
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, _BatchNorm) and precision != "fp32"):
            wrong.append(f"has {type(module).__name__} ({name}) in {precision}: use GroupNorm")
    if wrong:
        raise InputError(
            f"--parallel shard cannot share a model that {wrong[0]}, or use --parallel replicate"
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that are gathered one at a time; their parameters are all their own."""

    def uses(module: nn.Module) -> Counter[Tensor]:
        return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))

    of_model = uses(model)
    return [
        block
        for block in find_blocks(model)
        if all(of_model[parameter] == count for parameter, count in uses(block).items())
    ]


class ShardedModel(nn.Module):
    """A model that ranks share, below a root that calls functions of it.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Collated], T], batch: Collated) -> T:
        """Call a function of the model and a micro-batch; all ranks call it together."""
        return function(self.model, batch)

    def attach(self, train_state: TrainState) -> None:
        """Let what a train state calls of the model run through the root."""
        loss = train_state.loss
        train_state.loss = lambda _, batch: self(loss, batch)
        train_state.run, train_state.forget_gathered = self, self.forget_gathered

    def materialize(self, device: torch.device) -> None:
        """Take memory for the parts of this rank of a model on ``meta``: any parameters, and buffers of 0."""
        # Tied buffers stay one, as parameters do by themselves.
        made = {buffer: torch.zeros_like(buffer, device=device) for buffer in self.buffers()}
        self._apply(  # type: ignore[no-untyped-call]
            lambda tensor: made[tensor] if tensor in made else torch.empty_like(tensor, device=device)
        )

    def forget_gathered(self) -> None:
        """Free all gathered parameters, so that changed weights are gathered anew."""
        for module in self.parts():
            module.reshard()

    def parts(self) -> Iterator[FSDPModule]:
        """Yield the modules that are gathered one at a time, with the root."""
        return (module for module in self.modules() if isinstance(module, FSDPModule))


def shard(mesh: DeviceMesh, model: nn.Module, precision: Precision) -> ShardedModel:
    """Shard a model in place, before its optimizer is built: its blocks, then the loss with the rest.

    Args:
        mesh: the ranks.
        model: on the device of the mesh, on ``meta``, or of fake tensors.
        precision: the type of gathered weights of blocks.

    Raises:
        InputError: the model cannot be sharded; the message says why.
    """
    check_sharding(model, precision)
    low, wide = AUTOCAST_DTYPES.get(precision), torch.float32
    is_low = low is not None or bool(low_precision_parameters(model))
    inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wide if is_low else None)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=inner)
    root = ShardedModel(model)
    whole = MixedPrecisionPolicy(reduce_dtype=inner.reduce_dtype, cast_forward_inputs=False)
    fully_shard(root, mesh=mesh, mp_policy=whole)
    for module in root.parts():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return root


Sharding: TypeAlias = Callable[[nn.Module, Precision], ShardedModel]
"""`shard` over some ranks."""


def shard_over(group: Group, model: nn.Module, precision: Precision, device: torch.device) -> ShardedModel:
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
    sharded = shard(mesh, on_meta(model), precision)
    sharded.materialize(device)
    with group.waiting("receive the first weights"):
        set_model_state_dict(
            sharded.model,
            model.state_dict() if group.rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
    for whole, buffer in zip(model.buffers(), sharded.buffers(), strict=True):
        if group.rank == 0:
            buffer.copy_(whole)
    group.send(sharded.buffers())  # no checkpoint keeps some of them
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.new_empty(0)  # its memory is free for the run
    return sharded


def sharded_copy(
    model: nn.Module, sharding: Sharding, precision: Precision, device: torch.device
) -> ShardedModel:
    """Return a copy of a model with the parts of one rank on its device; their values are not the model's.

    Args:
        model: on ``meta`` or in host memory; left unchanged.
        sharding: of `sharding_alone`.
        precision: of the forward pass.
        device: of the rank.

    Raises:
        InputError: the model cannot be sharded.
    """
    sharded = sharding(on_meta(model), precision)
    sharded.materialize(device)
    for part in sharded.parts():
        # Of real ranks the sums would arrive. The backend "fake" gathers copies of the part of this rank.
        part.set_custom_reduce_scatter(_OwnSum())  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in local_parts([*sharded.parameters()]):
            if parameter.is_floating_point():
                parameter.normal_(0.0, PROBE_STD)
            else:
                parameter.zero_()
    return sharded


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
        return partial(shard, DeviceMesh.from_group(group, device_type, mesh_dim_names=ALONE))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return partial(shard, init_device_mesh(device_type, (world,), mesh_dim_names=ALONE))


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
        OSError: a rank could not write its part, on every rank.
        RankLost: another rank ended.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files_of(shards, group.world), save_distributed=True
    )
    try:
        with group.waiting("write the checkpoint"):
            save(
                dict(shards),
                storage_writer=writer,
                process_group=group.tensor_group(torch.device("cpu")),
            )
    except CheckpointException as error:  # the same on every rank
        raise next(iter(error.failures.values()))[0] from None
    # The files of this rank begin with its number; DCP counts from 1.
    own = {path.name: file_entry(path) for path in sorted(folder.glob(f"shard-{group.rank + 1:05d}-*"))}
    return {name: entry for of_rank in group.gather(own) for name, entry in of_rank.items()}


def read_shards(folder: Path, wanted: Mapping[str, WholeTensor], model: nn.Module) -> dict[str, Tensor]:
    """Read sharded tensors, whichever number of ranks wrote them; no rank waits for another.

    Args:
        folder: of the checkpoint.
        wanted: the tensors by name.
        model: has the weights, of which the sharded ones are read in place. The other tensors are new, and
            sharded alike, or whole and on the CPU if no weight is sharded.

    Returns:
        The tensors by name.
    """
    weights = {f"model/{name}": value for name, value in model.state_dict().items()}
    mesh = next((value.device_mesh for value in weights.values() if isinstance(value, DTensor)), None)
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
            raise next(iter(error.failures.values()))[0] from None
    return tensors


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a sharded model with whole tensors on the CPU; all ranks call it.

    One tensor at a time is whole on the device. Only rank 0 keeps it; the others return an empty one.
    """
    state: dict[str, Any] = {}
    keep = dist.get_rank() == 0
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
