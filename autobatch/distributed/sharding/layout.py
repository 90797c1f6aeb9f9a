"""Checks of a model that ranks are to share, in the user's words, before FSDP2 would refuse it.

Nothing here imports FSDP, which takes a second.
"""

from __future__ import annotations

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.step.apply_knobs import find_blocks


def check_sharding(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, after a check that FSDP2 can shard the model.

    Raises:
        InputError: it cannot; the message says why.
    """
    blocks = find_blocks(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"--parallel shard cannot run SyncBatchNorm ({name}), whose ranks must have equal "
                "micro-batches on GPUs: use BatchNorm or GroupNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(f"--parallel shard cannot sum the sparse gradient of {name}: use sparse=False")
    scalar = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
    if scalar is not None:
        raise InputError(
            f"--parallel shard cannot split {scalar}, a parameter without a dimension: give it the shape "
            "(1,), or use --parallel replicate"
        )
    _check_ties(model, blocks)
    trained = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    if len(trained) > 1:
        (dtype, name), (other, another) = list(trained.items())[:2]
        raise InputError(
            f"--parallel shard needs one type for all trained parameters: {name} is {_short(dtype)}, and "
            f"{another} is {_short(other)}. Convert the model with .to(…), or freeze some"
        )
    return blocks


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
                    "them: untie it, or use --parallel replicate"
                )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
