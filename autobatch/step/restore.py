"""Temporary weights for a model, an empty state for its optimizers, and a snapshot of its buffers.

The probe and the trials really train, on copies of the model's tensors. Afterwards the user's parameters,
buffers, gradients and modes are the same objects with the same values.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.workload.rng import preserved_generators

SMALL_BUFFER = 2**18
"""Elements of the largest buffer that is copied for every batch."""


@contextmanager
def temporary_weights(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Replace the model's tensors by copies on ``device`` within the block.

    Parameters and buffers stay the same objects, because optimizers and ties refer to them; only their data
    change. On exit data, gradients, modes and ``requires_grad`` are restored. Modules, buffers and attributes
    that a forward pass added are removed.
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    modules = list(model.modules())
    saved = [(t, t.data, t.grad, t.requires_grad) for t in tensors]
    # Attributes hold modes, and what a forward pass stored: a cache, the last features.
    registries: list[tuple[dict[str, Any], dict[str, Any]]] = [
        pair
        for module in modules
        for pair in (
            (vars(module), _attributes(module)),
            *((own, dict(own)) for own in (module._parameters, module._buffers, module._modules)),
        )
    ]
    try:
        for tensor, data, _, _ in saved:
            tensor.grad = None
            tensor.data = data.to(device, copy=True)
        for module in modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # as `Module.to` does, or cuDNN copies the weights in each pass
        with preserved_generators(*modules):
            yield model
    finally:
        for registry, entries in registries:
            registry.clear()
            registry.update(entries)
        for tensor, data, gradient, requires_grad in saved:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; the lists and dicts of its own as copies, which a pass may fill."""
    return {
        name: copy.copy(value)
        if isinstance(value, list | dict | set | deque) and not name.startswith("_")
        else value
        for name, value in vars(module).items()
    }


@contextmanager
def temporary_state(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Give optimizers, which may be the user's own in use, an empty state within the block."""
    saved = [(optimizer, optimizer.state) for optimizer in optimizers]
    for optimizer, _ in saved:
        optimizer.state = defaultdict(dict)
    try:
        yield
    finally:
        for optimizer, state in saved:
            optimizer.state = state


class BufferSnapshot:
    """A snapshot of what a forward pass may write, from which a failed step restores it.

    Small buffers (statistics) are copied for every batch, because the kernels of BatchNorm write them without
    raising their version. Large buffers (mask, table, queue) and frozen parameters (of a teacher that follows
    the model) are only watched: a batch that changed one cannot run again. With ``copy_all`` everything is
    copied.
    """

    def __init__(self, model: nn.Module, *, copy_all: bool = False) -> None:
        self._copy_all = copy_all
        self._modules = [module for module in model.modules() if module._buffers]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._registries: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._watched: list[tuple[Tensor, int, torch.UntypedStorage]] = []

    def take(self) -> None:
        """Take a snapshot of the buffers and of the frozen parameters."""
        self.commit()
        self._registries = [(module, dict(module._buffers)) for module in self._modules]
        buffers = [b for _, registry in self._registries for b in registry.values() if b is not None]
        for tensor in (*buffers, *self._frozen):
            is_small = tensor.numel() <= SMALL_BUFFER and not isinstance(tensor, nn.Parameter)
            if is_small or self._copy_all:
                self._copies.append((tensor, tensor.detach().clone()))
            else:
                # A write raises the version, and a new ``data`` replaces the storage, which is held, so that
                # no other tensor can take its place.
                self._watched.append((tensor, tensor._version, tensor.untyped_storage()))

    def commit(self) -> None:
        """Keep what was written, and drop the snapshot."""
        self._registries, self._copies, self._watched = [], [], []

    def restore(self, *, keep: bool = False) -> bool:
        """Restore the buffers from their copies; ``keep`` the snapshot, so that it can be restored once more.

        Returns:
            False if a buffer or a frozen parameter without a copy has changed.
        """
        for module, buffers in self._registries:
            module._buffers.update(buffers)
        for tensor, copied in self._copies:
            # A write to its data leaves the version as it is: another snapshot may watch that.
            tensor.data.copy_(copied)
        is_complete = all(
            # Not by the pointer to its data, which the shards of ranks do not tell.
            tensor._version == version and tensor.untyped_storage()._cdata == storage._cdata
            for tensor, version, storage in self._watched
        )
        if not keep:
            self.commit()
        return is_complete
