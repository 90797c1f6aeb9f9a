"""What must be afterwards as it was: random states, and a model that is only lent.

The probe and the trials train for real, on tensors of their own; the caller's parameters, buffers, gradients
and modes come back as the very objects that they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autobatch.core.errors import InputError

SMALL_BUFFER = 2**18
"""Elements: buffers up to this size are copied for every window."""


@contextmanager
def temporary_weights(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Inside, the model's tensors are copies on ``device``; afterwards its own come back, untouched.

    Parameters and buffers keep their identity as objects (optimizers and ties hold on to them); only what
    they hold is exchanged. Gradients, modes and ``requires_grad`` come back too, and what a forward pass
    registers or sets as an attribute is gone.

    Raises:
        InputError: the model has parameters without a shape yet (lazy modules).
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    if any(is_lazy(tensor) for tensor in tensors):
        raise InputError(
            "the model has lazy modules whose parameters have no shape yet: run one forward pass inside "
            "Workload(model=…) before returning it"
        )
    kept = [(t, t.data, t.grad, t.requires_grad) for t in tensors]
    modules = [
        (module, dict(vars(module)), [(known, dict(known)) for known in _registries(module)])
        for module in model.modules()
    ]
    try:
        for tensor, data, _, _ in kept:
            tensor.grad = None
            tensor.data = data.to(device, copy=True)
        yield model
    finally:
        for module, attributes, registries in modules:
            # Modes, and what a forward pass keeps on the side: a cache, the last features.
            vars(module).clear()
            vars(module).update(attributes)
            for registry, entries in registries:
                registry.clear()
                registry.update(entries)
        for tensor, data, gradient, requires_grad in kept:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


class BufferSnapshot:
    """Keeps what a window may have to be put back to, besides the random states: the model's buffers.

    Statistics are small and copied for every window. Of large buffers (masks, tables, queues) only those
    are that were seen to change in an earlier window; or all, for what cannot do without.
    """

    def __init__(self, model: nn.Module, *, copy_all: bool = False) -> None:
        self._largest = math.inf if copy_all else SMALL_BUFFER
        self._modules = [module for module in model.modules() if module._buffers]
        self._entries: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._watched: list[tuple[Tensor, int, tuple[int, str]]] = []
        self._changing: set[tuple[int, str]] = set()

    def keep(self) -> None:
        """Take the buffers down as they are now."""
        self._entries = [(module, dict(module._buffers)) for module in self._modules]
        self._copies, self._watched = [], []
        for number, (_, entries) in enumerate(self._entries):
            for name, buffer in entries.items():
                if buffer is None:
                    continue
                # Kernels update the running statistics of a BatchNorm without counting a version.
                if buffer.numel() <= self._largest or (number, name) in self._changing:
                    self._copies.append((buffer, buffer.detach().clone()))
                else:
                    self._watched.append((buffer, buffer._version, (number, name)))

    def commit(self) -> None:
        """The window is done; remember which large buffers it changed."""
        self._changing |= {key for buffer, version, key in self._watched if buffer._version != version}
        self._entries, self._copies, self._watched = [], [], []

    def rewind(self) -> None:
        """Make the buffers what they were, as far as they were copied; they can be put back once more."""
        with torch.no_grad():
            for module, entries in self._entries:
                module._buffers.update(entries)
            for buffer, kept in self._copies:
                buffer.copy_(kept)

    def restore(self) -> bool:
        """Make the buffers what they were; False if one has changed that was not copied."""
        self.rewind()
        whole = all(buffer._version == version for buffer, version, _ in self._watched)
        self.commit()
        return whole


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules
