"""Checks of a model before it is sharded: what FSDP2 would refuse later, in words that name the parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autobatch.core.errors import InputError
from autobatch.core.records import ShardSync
from autobatch.step.gradients import low_precision_parameters


def check_shapes(model: nn.Module) -> None:
    """Check that all parameters have a shape.

    Raises:
        InputError: one belongs to a lazy module.
    """
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if is_lazy(tensor):
            raise InputError(
                f"--parallel shard needs parameters with a shape, and {name} has none yet: run one forward "
                "pass inside Workload(model=…) before returning the model"
            )


def sync_of(model: nn.Module, asked: ShardSync) -> ShardSync:
    """Return when the gradients of a shared model are reduced: once per step if weights have 16 bits.

    Parts of gradients have the type of the weights, and sums of many micro-batches need more bits.
    """
    return "once" if low_precision_parameters(model) else asked


def check_model(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Check what FSDP2 would refuse later, in words that name the parameter.

    Raises:
        InputError: a parameter has no shape yet, is shared between blocks, or has another type than the rest.
    """
    check_shapes(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"--parallel shard cannot run SyncBatchNorm ({name}), whose ranks must have equal "
                "micro-batches on GPUs: use BatchNorm or GroupNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"--parallel shard cannot sum the sparse gradient of {name}: use sparse=False, or --parallel "
                "replicate"
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
