"""Fakes of a model and of a batch: tensors with shapes, and no values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def new_mode() -> FakeTensorMode:
    """Return a mode for fakes. A real tensor in the user's code becomes a fake in its first operator."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake CPU tensor with the same shape, strides and type; a parameter if it is one."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model with fake tensors, in which tied tensors stay tied.

    Raises:
        Exception: a module of the user's cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)  # the module itself, if the model is compiled
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
    # deepcopy takes copies from its memo, so it never reads a tensor.
    memo: dict[int, Any] = {id(tensor): fake_copy(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a batch with fake tensors in its tuples, lists, mappings, and attributes of objects."""
    if isinstance(batch, Tensor):
        return fake_copy(batch, mode)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = fake_batch(value, mode)
        return made
    if isinstance(batch, Mapping):
        return {key: fake_batch(value, mode) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        fakes = [fake_batch(value, mode) for value in batch]
        return type(batch)(*fakes) if hasattr(batch, "_fields") else type(batch)(fakes)
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        # Past a ``__setattr__`` of its own, which may put attributes elsewhere, as that of a graph does.
        for name, value in list(vars(made).items()):
            if isinstance(value, Tensor | Mapping | list | tuple):
                vars(made)[name] = fake_batch(value, mode)
        return made
    return batch


@contextmanager
def without_log() -> Iterator[None]:
    """Leave out torch's own log within the block: what cannot be traced is told in one line."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def known_values(tensor: Tensor) -> Tensor | None:
    """Return the values of a fake of whole numbers; None if they are unknown."""
    found = tensor.constant if isinstance(tensor, FakeTensor) else None
    return None if found is None or found.is_floating_point() else found
