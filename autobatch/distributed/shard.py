"""A train state whose parameters, gradients and optimizer state are sharded over ranks by FSDP2.

The repeated blocks of a model are sharded one by one, and everything else with the loss, which is the root.
The root is the loss and not the model, because a loss may call any method of a model. Each rank holds one
part of every parameter. A block is gathered before its forward and its backward pass, and freed after each.

Ranks sum their gradients and do not average them: one divisor for the whole batch is in the loss already
(`autobatch.step.train_step`). In 16 bits the gathered weights and the activations have 16 bits, in place of
autocast; parameters, gradients of a rank and the outputs of the model stay in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from autobatch.core.errors import InputError
from autobatch.core.records import Precision, ShardSync
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, Loss

LossFunction = Callable[[nn.Module, Collated], Tensor | Loss]
_LOW_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMED = 5
"""Modules that a message names."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The ranks that share a model, and the way in which they do."""

    mesh: DeviceMesh
    sync: ShardSync = "each"
    modules: str | None = None
    """Regular expression that the full names of modules to gather at a time match; None for the blocks."""

    def __call__(self, model: nn.Module, precision: Precision) -> ShardedModel:
        """Shard a model in place, before its optimizer is built.

        Raises:
            InputError: the model cannot be sharded; the message says why.
        """
        return shard(model, self, precision)


class ShardedModel:
    """A model that is sharded, with the loss as the root of its modules.

    Args:
        root: the loss, with the model in it.
        sync: when gradients are reduced.
    """

    def __init__(self, root: _LossModule, sync: ShardSync) -> None:
        self._root = root
        self._sync = sync

    def attach(self, train_state: TrainState) -> None:
        """Let the loss of a train state run through the root.

        Raises:
            InputError: its optimizers do not train all parameters that require a gradient.
        """
        trained = {id(parameter) for parameter in train_state.parameters}
        left = [
            name
            for name, parameter in train_state.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in trained
        ]
        if left:
            raise InputError(
                f"--parallel shard needs an optimizer for every parameter that requires a gradient, and "
                f"{len(left)} have none, for example {left[0]}: freeze them (requires_grad_(False)), or give "
                "them to the optimizer"
            )
        root = self._root
        root.loss = train_state.loss
        # What autocast would do, the gathered weights do.
        train_state.precision = "fp32"
        train_state.loss = lambda _, batch: root(batch)

    def passing(
        self, micro_batches: Iterable[tuple[Collated, int]], count: int
    ) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of a step, and reduce gradients after each of them or after the last."""
        root: Any = self._root
        fetched = iter(micro_batches)
        for number in range(1, count + 1):
            is_last = number == count
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last or self._sync == "each")
            # Not bound to a name, which would hold it until the next one is fetched.
            yield next(fetched)


class _LossModule(nn.Module):
    """The loss as the forward pass of a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss: Any = None

    def forward(self, batch: Collated) -> Any:
        return self.loss(self.model, batch)


def shard(model: nn.Module, sharding: Sharding, precision: Precision) -> ShardedModel:
    """Shard a model in place: its blocks bottom-up, then the loss with the rest of it.

    Args:
        model: on the device of the mesh, on ``meta``, or of fake tensors.
        sharding: the ranks.
        precision: the type of gathered weights and of activations.

    Raises:
        InputError: the model cannot be sharded; the message says why.
    """
    blocks = modules_to_shard(model, sharding.modules)
    _check_model(model, blocks)
    policy = _policy_of(model, precision)
    root = _LossModule(model)
    inner = {id(module) for block in blocks for module in block.modules()}
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and policy.param_dtype is not None]
    inner |= {id(norm) for norm in norms}
    for norm in norms:
        # Their kernels need weights in the type of the running statistics.
        fully_shard(norm, mesh=sharding.mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in (one for one in blocks if one not in norms):
        fully_shard(block, mesh=sharding.mesh, mp_policy=policy)
    fully_shard(root, mesh=sharding.mesh, mp_policy=_without_casts(policy))
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if policy.param_dtype is not None:
        _cast_inputs([m for m in model.modules() if id(m) not in inner], policy.param_dtype)
        model.register_forward_hook(lambda _, __, out: _cast(out, torch.float32))
    return ShardedModel(root, sharding.sync)


def modules_to_shard(model: nn.Module, pattern: str | None = None) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, inner ones first.

    Args:
        model: the model.
        pattern: regular expression for full names; None for the repeated blocks of the model.

    Raises:
        InputError: the pattern is invalid, or no name matches it.
    """
    if pattern is None:
        return find_blocks(model)
    try:
        rule = re.compile(pattern)
    except re.error as error:
        raise InputError(f"--shard-modules {pattern} is no regular expression: {error}") from error
    named = {name: module for name, module in model.named_modules() if name}
    found = [module for name, module in named.items() if rule.fullmatch(name)]
    if not found:
        some = ", ".join(list(named)[:_NAMED]) or "none"
        raise InputError(
            f"--shard-modules {pattern} matches none of the {len(named)} modules: give a regular expression "
            f"for a full name, for example one of {some}"
        )
    # Deeper modules come after their parents in the order of names.
    return found[::-1]


def _check_model(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Check what FSDP2 would refuse later, in words that name the parameter.

    Raises:
        InputError: a parameter has no shape yet, is shared between blocks, or has another type than the rest.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            raise InputError(
                f"--parallel shard needs parameters with a shape, and {name} has none yet: run one forward "
                "pass inside Workload(model=…) before returning the model"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"--parallel shard cannot run SyncBatchNorm ({name}), whose ranks must have equal "
                "micro-batches on GPUs: use BatchNorm or GroupNorm"
            )
    _check_ties(model, blocks)
    trained = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    if len(trained) > 1:
        (one, name), (other, another) = list(trained.items())[:2]
        raise InputError(
            f"--parallel shard needs one type for all trained parameters: {name} is {_short(one)}, and "
            f"{another} is {_short(other)}. Convert the model with .to(…), or freeze some"
        )


def _check_ties(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Check that no parameter belongs to two blocks, or to a block and the rest of the model.

    Raises:
        InputError: one does.
    """
    block_of = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    owner: dict[int, int | None] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        place = block_of.get(id(module))
        for name, parameter in module.named_parameters(recurse=False):
            if owner.setdefault(id(parameter), place) != place:
                raise InputError(
                    f"--parallel shard gathers blocks one by one, and {module_name}.{name} belongs to two of "
                    "them: untie it, or choose other blocks with --shard-modules"
                )


def _policy_of(model: nn.Module, precision: Precision) -> MixedPrecisionPolicy:
    """Return the types of gathered weights and of reductions."""
    is_low = any(p.dtype in LOW_PRECISION for p in model.parameters() if p.requires_grad)
    low = _LOW_DTYPES.get(precision)
    if low is None and not is_low:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)


def _without_casts(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of the root: the batch keeps its types, because targets are part of it."""
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False
    )


def _cast_inputs(modules: list[nn.Module], dtype: torch.dtype) -> None:
    """Let modules with parameters of their own receive inputs in the type of their weights."""
    for module in modules:
        if any(p.is_floating_point() for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _cast((args, kwargs), dtype), with_kwargs=True
            )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if eligible else tensor

    return tree_map_only(Tensor, one, values)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
