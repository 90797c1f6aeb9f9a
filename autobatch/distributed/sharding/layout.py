"""The layout of a model over ranks, in plain values that travel to a child process, and its checks.

The checks say in the user's words what FSDP2 would refuse later. Nothing here imports FSDP, which takes a
second.
"""

from __future__ import annotations

import re

import msgspec
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.records import Record, ShardSync
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.gradients import low_precision_parameters

ONCE = "the weights have 16 bits, and sums of many micro-batches need more"
"""The reason for one reduction per step where another was asked for."""
_NAMED = 5
"""Modules that a message names."""


class ShardLayout(Record, frozen=True, kw_only=True):
    """A model that is sharded over ranks."""

    world: int
    """Number of ranks."""
    sync: ShardSync = "each"
    """Reduction of gradients: after each micro-batch, or once per step."""
    modules: str | None = None
    """Regular expression for the modules to gather at a time; None for the repeated blocks."""

    def fitting(self, model: nn.Module) -> ShardLayout:
        """Return the layout that a model gets."""
        return msgspec.structs.replace(self, sync=sync_of(model, self.sync))

    def __str__(self) -> str:
        return f"shard:{self.sync}:{self.modules or ''}"


def sync_of(model: nn.Module, asked: ShardSync) -> ShardSync:
    """Return when the gradients of a sharded model are reduced: once per step if weights have 16 bits.

    Shards of gradients have the type of the weights, and sums of many micro-batches need more bits.
    """
    return "once" if low_precision_parameters(model) else asked


def check_sharding(model: nn.Module, pattern: str | None) -> list[nn.Module]:
    """Return the modules of `modules_to_shard`, after a check that FSDP2 can shard the model.

    Raises:
        InputError: it cannot; the message says why.
    """
    blocks = modules_to_shard(model, pattern)
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
    scalar = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
    if scalar is not None:
        raise InputError(
            f"--parallel shard cannot split {scalar}, a parameter without a dimension: give it the shape "
            "(1,), or use --parallel replicate"
        )
    _check_ties(model, blocks)
    trained = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    if len(trained) > 1:
        (one, name), (other, another) = list(trained.items())[:2]
        raise InputError(
            f"--parallel shard needs one type for all trained parameters: {name} is {_short(one)}, and "
            f"{another} is {_short(other)}. Convert the model with .to(…), or freeze some"
        )
    return blocks


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
