"""Fakes of a model and of a batch: tensors with shapes, and no values but those of few whole numbers.

The memory of some steps depends on whole numbers of a batch, its lengths, indices and masks: packed sequences
have a row in each step of time for each sequence that is as long. Torch's fakes can carry a real tensor, and
compute with it if all arguments of an operator carry one. Torch does so for single numbers; here tensors of a
batch can as well.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.utils._mode_utils import no_dispatch

MOST_ELEMENTS = 1 << 16
"""Elements up to which a tensor keeps its values: enough for lengths, and quick to compute with."""


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


def fake_batch(batch: Any, mode: FakeTensorMode, *, keeps_values: bool = False) -> Any:
    """Return a batch with fake tensors in its tuples, lists, mappings, and attributes of objects.

    Whole numbers keep their values if ``keeps_values``.
    """
    if isinstance(batch, Tensor):
        return fake_with_values(batch, mode) if keeps_values and has_values(batch) else fake_copy(batch, mode)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = fake_batch(value, mode, keeps_values=keeps_values)
        return made
    if isinstance(batch, Mapping):
        return {key: fake_batch(value, mode, keeps_values=keeps_values) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        fakes = [fake_batch(value, mode, keeps_values=keeps_values) for value in batch]
        if keeps_values and isinstance(batch, PackedSequence):
            fakes[1] = own_copy(batch.batch_sizes)  # read without any operator
        return type(batch)(*fakes) if hasattr(batch, "_fields") else type(batch)(fakes)
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        # Past a ``__setattr__`` of its own, which may put attributes elsewhere, as that of a graph does.
        for name, value in list(vars(made).items()):
            if isinstance(value, Tensor | Mapping | list | tuple):
                vars(made)[name] = fake_batch(value, mode, keeps_values=keeps_values)
        return made
    return batch


@contextmanager
def values_kept() -> Iterator[None]:
    """Let fakes of up to `MOST_ELEMENTS` keep their values within the block."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST_ELEMENTS
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


@contextmanager
def without_log() -> Iterator[None]:
    """Leave out torch's own log within the block: what cannot be traced is told in one line."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def readable_as_arrays(read: Callable[[Tensor], Any]) -> Iterator[None]:
    """Let NumPy, and what takes its arrays, read fakes within the block, by a function that returns an array.

    A fake hands no operator to the mode then: torch refuses ``numpy()`` of a subclass.
    """

    def numpy(tensor: Any, *, force: bool = False) -> Any:
        if tensor.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()")
        return read(tensor)

    FakeTensor.numpy = numpy  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del FakeTensor.numpy


def fake_with_values(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake of whole numbers that has their values; it changes without the tensor."""
    return mode.fake_tensor_converter.from_real_tensor(mode, own_copy(tensor), make_constant=True)


def own_copy(tensor: Tensor) -> Tensor:
    """Return a real copy of a tensor, past any mode."""
    with no_dispatch():
        return tensor.clone()


def has_values(tensor: Tensor) -> bool:
    """Return whether a real tensor keeps its values: few whole numbers on the host."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_whole and tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a fake of whole numbers; None if they are unknown."""
    found = tensor.constant if isinstance(tensor, FakeTensor) else None
    return None if found is None or found.is_floating_point() else found
