"""Temporary weights for a model, and a snapshot of its buffers.

The probe and the trials really train, on copies of the model's tensors. Afterwards the user's parameters,
buffers, gradients and modes are the same objects with the same values.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autobatch.core.errors import InputError

SMALL_BUFFER = 2**18
"""Elements of the largest buffer that is copied for every batch."""


@contextmanager
def temporary_weights(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Replace the model's tensors by copies on ``device`` within the block.

    Parameters and buffers stay the same objects, because optimizers and ties refer to them; only their data
    change. On exit data, gradients, modes and ``requires_grad`` are restored. Modules, buffers and attributes
    that a forward pass added are removed.

    Raises:
        InputError: a lazy module has parameters without a shape.
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    if any(is_lazy(tensor) for tensor in tensors):
        raise InputError(
            "the model has lazy modules whose parameters have no shape yet: run one forward pass inside "
            "Workload(model=…) before returning it"
        )
    saved = [(t, t.data, t.grad, t.requires_grad) for t in tensors]
    modules = [
        (
            module,
            _attributes(module),
            [(known, dict(known)) for known in (module._parameters, module._buffers, module._modules)],
        )
        for module in model.modules()
    ]
    generators = [
        (value, value.get_state())
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Generator)
    ]
    try:
        for tensor, data, _, _ in saved:
            tensor.grad = None
            tensor.data = data.to(device, copy=True)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # as `Module.to` does, or cuDNN copies the weights in each pass
        yield model
    finally:
        for module, attributes, registries in modules:
            # Attributes hold modes, and what a forward pass stored: a cache, the last features.
            vars(module).clear()
            vars(module).update(attributes)
            for registry, entries in registries:
                _refill(registry, entries)
        for generator, state in generators:
            generator.set_state(state)
        for tensor, data, gradient, requires_grad in saved:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


def restorer_of(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], None]:
    """Copy the state of optimizers, which may be the user's own, to the host; return what restores it."""
    states = [(one.state, dict(one.state)) for one in optimizers]
    parts = [part for _, state in states for part in state.values() if isinstance(part, dict)]
    saved = [(part, dict(part), _on_host(part)) for part in parts]

    def restore() -> None:
        for state, former in states:
            state.clear()
            state.update(former)
        for part, values, copies in saved:
            part.clear()
            part.update(values)
            for name, copied in copies.items():
                values[name].copy_(copied)

    return restore


def _on_host(part: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one.to("cpu", copy=True) for name, one in part.items() if isinstance(one, Tensor)}


class BufferSnapshot:
    """A snapshot of what a forward pass may write, from which a failed step restores it.

    Small buffers (statistics) are copied for every batch. A large buffer (mask, table, queue) is copied only
    if an earlier batch changed it, and so is a frozen parameter (of a teacher that follows the model). Small
    frozen parameters are also copied for the first batch, after which it is known whether they change.

    Args:
        model: the model whose buffers are restored.
        copy_all: copy the large buffers for every batch too.
    """

    def __init__(self, model: nn.Module, *, copy_all: bool = False) -> None:
        self._largest = math.inf if copy_all else SMALL_BUFFER
        self._modules = [module for module in model.modules() if module._buffers]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._entries: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._watched: list[tuple[Tensor, _Mark, object]] = []
        self._changing: set[object] = set()
        """Keys of large buffers and of frozen parameters that a batch has changed."""
        self._is_first = True

    def take(self) -> None:
        """Take a snapshot of the buffers and of the frozen parameters."""
        self._copies, self._watched = [], []
        self._entries = [(module, dict(module._buffers)) for module in self._modules]
        for number, (_, entries) in enumerate(self._entries):
            for name, buffer in entries.items():
                # A version counter misses writes: BatchNorm kernels update statistics without raising it.
                if buffer is not None and buffer.numel() <= self._largest:
                    self._copy(buffer)
                elif buffer is not None:
                    self._watch(buffer, (number, name))
        for number, parameter in enumerate(self._frozen):
            if self._is_first and parameter.numel() <= self._largest:
                self._copy(parameter)
            self._watch(parameter, number)

    def _copy(self, tensor: Tensor) -> None:
        self._copies.append((tensor, tensor.detach().clone()))

    def _watch(self, tensor: Tensor, key: object) -> None:
        if key in self._changing:
            self._copy(tensor)
        self._watched.append((tensor, _Mark(tensor), key))

    def commit(self) -> None:
        """Keep what was written, drop the snapshot, and remember what the batch changed."""
        self._is_first = self._is_first and not (self._entries or self._watched)
        self._changing |= {key for tensor, mark, key in self._watched if mark.differs(tensor)}
        self._entries, self._copies, self._watched = [], [], []

    def restore(self, *, keep: bool = False) -> bool:
        """Restore the buffers from their copies; ``keep`` the snapshot, so that it can be restored once more.

        Returns:
            False if a buffer or a frozen parameter without a copy has changed.
        """
        with torch.no_grad():
            for module, entries in self._entries:
                for name, buffer in entries.items():
                    module._buffers[name] = buffer
            copied = {id(tensor) for tensor, _ in self._copies}
            is_complete = not any(
                mark.differs(tensor) for tensor, mark, _ in self._watched if id(tensor) not in copied
            )
            for tensor, copy in self._copies:
                # A write to its data leaves the version as it is: another snapshot may watch that.
                tensor.data.copy_(copy)
        if not keep:
            self.commit()
        return is_complete


class _Mark:
    """The version and the storage of a tensor: a write raises the one, and a new ``data`` replaces the other.

    The storage is held, so that no other tensor can take its place. A traced tensor has no data pointer.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        self._storage = tensor.untyped_storage()

    def differs(self, tensor: Tensor) -> bool:
        """Check whether the tensor was written since."""
        return tensor._version != self._version or tensor.untyped_storage()._cdata != self._storage._cdata


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; the lists and dicts of its own as copies, which a pass may fill."""
    return {
        name: copy.copy(value)
        if isinstance(value, list | dict | set | deque) and not name.startswith("_")
        else value
        for name, value in vars(module).items()
    }


def _refill(registry: MutableMapping[str, Any], entries: dict[str, Any]) -> None:
    """Give a registry the entries that it had; that of a TorchScript module never gains or loses any."""
    if isinstance(registry, dict):
        registry.clear()
        registry.update(entries)
        return
    for name, entry in entries.items():
        if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter):
            registry[name] = entry
