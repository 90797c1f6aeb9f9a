"""Temporary weights for a model, and a snapshot of its buffers.

The probe and the trials really train, on copies of the model's tensors. Afterwards the user's parameters,
buffers, gradients and modes are the same objects with the same values.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
        InputError: a lazy module has parameters without a shape, or the model is one of TorchScript.
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    if any(is_lazy(tensor) for tensor in tensors):
        raise InputError(
            "the model has lazy modules whose parameters have no shape yet: run one forward pass inside "
            "Workload(model=…) before returning it"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise InputError(
            "the model is one of TorchScript, whose tensors are out of reach: return it unscripted"
        )
    saved = [(t, t.data, t.grad, t.requires_grad) for t in tensors]
    modules: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = [
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
                registry.clear()
                registry.update(entries)
        for generator, state in generators:
            generator.set_state(state)
        for tensor, data, gradient, requires_grad in saved:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


def restorer_of(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], None]:
    """Copy the state of optimizers, which may be the user's own, to the host; return what restores it."""
    states = [(optimizer.state, dict(optimizer.state)) for optimizer in optimizers]
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
    return {name: value.to("cpu", copy=True) for name, value in part.items() if isinstance(value, Tensor)}


class _Kept(NamedTuple):
    """A tensor at the start of a batch.

    A write raises its version, and a new ``data`` replaces its storage, which is held, so that no other
    tensor can take its place.
    """

    key: Hashable
    tensor: Tensor
    copy: Tensor | None
    """None if it is only watched."""
    version: int
    storage: torch.UntypedStorage

    @property
    def is_changed(self) -> bool:
        """True if the tensor was written since. A traced tensor has no data pointer to compare."""
        now = self.tensor.untyped_storage()._cdata
        return self.tensor._version != self.version or now != self.storage._cdata


class BufferSnapshot:
    """A snapshot of what a forward pass may write, from which a failed step restores it.

    Small buffers (statistics) are copied for every batch, because the kernels of BatchNorm write them without
    raising their version. Large buffers (mask, table, queue) and frozen parameters (of a teacher that follows
    the model) are watched, and copied from the batch on after the first that changed them. Small frozen
    parameters are also copied for the first batch, after which it is known whether they change. With
    ``copy_all`` everything is copied for every batch.
    """

    def __init__(self, model: nn.Module, *, copy_all: bool = False) -> None:
        self._largest = math.inf if copy_all else SMALL_BUFFER
        self._modules = [module for module in model.modules() if module._buffers]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._registries: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._kept: list[_Kept] = []
        self._changing: set[Hashable] = set()
        """Keys of what a batch has changed."""
        self._is_first = True

    def take(self) -> None:
        """Take a snapshot of the buffers and of the frozen parameters."""
        self._registries = [(module, dict(module._buffers)) for module in self._modules]
        self._kept = [
            self._keep((number, name), buffer, copies_small=True)
            for number, (_, buffers) in enumerate(self._registries)
            for name, buffer in buffers.items()
            if buffer is not None
        ]
        for number, parameter in enumerate(self._frozen):
            self._kept.append(self._keep(number, parameter, copies_small=self._is_first))

    def _keep(self, key: Hashable, tensor: Tensor, *, copies_small: bool) -> _Kept:
        is_copied = key in self._changing or (copies_small and tensor.numel() <= self._largest)
        copied = tensor.detach().clone() if is_copied else None
        return _Kept(key, tensor, copied, tensor._version, tensor.untyped_storage())

    def commit(self) -> None:
        """Keep what was written, drop the snapshot, and remember what the batch changed."""
        self._is_first = self._is_first and not self._kept
        self._changing |= {kept.key for kept in self._kept if kept.is_changed}
        self._registries, self._kept = [], []

    def restore(self, *, keep: bool = False) -> bool:
        """Restore the buffers from their copies; ``keep`` the snapshot, so that it can be restored once more.

        Returns:
            False if a buffer or a frozen parameter without a copy has changed.
        """
        for module, buffers in self._registries:
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        is_complete = True
        with torch.no_grad():
            for kept in self._kept:
                if kept.copy is None:
                    is_complete = is_complete and not kept.is_changed
                else:
                    # A write to its data leaves the version as it is: another snapshot may watch that.
                    kept.tensor.data.copy_(kept.copy)
        if not keep:
            self.commit()
        return is_complete


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; the lists and dicts of its own as copies, which a pass may fill."""
    return {
        name: copy.copy(value)
        if isinstance(value, list | dict | set | deque) and not name.startswith("_")
        else value
        for name, value in vars(module).items()
    }
