"""What must be afterwards as it was: random states, and a model that is only lent.

The probe and the trials train for real, on tensors of their own; the caller's parameters, buffers, gradients
and modes come back as the very objects that they were.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RandomState(NamedTuple):
    """The generators that training draws from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """``None`` where NumPy was not imported."""
    torch: Tensor
    cuda: list[Tensor]
    """One state a card; empty where CUDA was not used."""


def capture_random_state() -> RandomState:
    """Read all generators."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
    )


def restore_random_state(state: RandomState) -> None:
    """Put all generators back to where they were."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)


def seed_everything(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Inside, draw as you like; afterwards all generators are where they were."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Inside, the model's tensors are copies on ``device``; afterwards its own come back, untouched.

    Parameters and buffers keep their identity as objects (optimizers and ties hold on to them); only what
    they hold is exchanged. Gradients, modes and ``requires_grad`` come back too.
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    kept = [(t, t.data, t.grad, t.requires_grad) for t in tensors]
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    try:
        for tensor, data, _, _ in kept:
            tensor.grad = None
            tensor.data = data.to(device, copy=True)
        yield model
    finally:
        for module, training, buffers in modules:
            module.training = training
            module._buffers = buffers
        for tensor, data, gradient, requires_grad in kept:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
