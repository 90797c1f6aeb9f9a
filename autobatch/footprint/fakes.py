"""Twins of tensors, batches and models that have shapes and no memory.

A twin stands on the CPU, whatever the original stands on: a model of 7B parameters on the meta device serves
as well as one that is there. The original is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def new_mode() -> FakeTensorMode:
    """A mode for fakes; a real tensor in the user's code becomes one when an operator meets it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def twin(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor of the same shape, strides and type; a parameter's is a parameter."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def twin_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model whose tensors are fakes; tied ones stay tied, whoever else holds on to them.

    Raises:
        Exception: what copying the user's modules raises.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled one, the module itself
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
    # With its answer in the memo, deepcopy never looks inside a tensor.
    memo: dict[int, Any] = {id(tensor): twin(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def twin_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """A batch with fakes in place of its tensors: in tuples, lists, mappings, and attributes of objects."""
    if isinstance(batch, Tensor):
        return twin(batch, mode)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = twin_batch(value, mode)
        return made
    if isinstance(batch, Mapping):
        return {key: twin_batch(value, mode) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        twins = [twin_batch(value, mode) for value in batch]
        return type(batch)(*twins) if hasattr(batch, "_fields") else type(batch)(twins)
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        for name, value in vars(batch).items():
            if isinstance(value, Tensor | Mapping | list | tuple):
                setattr(made, name, twin_batch(value, mode))
        return made
    return batch
