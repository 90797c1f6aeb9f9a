"""State that a forward pass writes: buffers and frozen parameters, named and put back between two passes.

They are those of the model, and of modules that the loss holds. State that is kept elsewhere is unknown here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.workload.contract import WholeBatchLoss

NAMED = 4
"""Names that a message lists of each kind."""
ELEMENTS = 1024
"""Elements of a frozen parameter that are compared: a pass that writes one writes all of it."""


class PassState:
    """The buffers and frozen parameters of some modules.

    Args:
        modules: by the name that a message calls them, empty for the model. They are given as they are before
            they get temporary weights.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._kept = [
            _Kept(module, ".".join(filter(None, [owner, path])), name, tensor)
            for owner, root in modules.items()
            for path, module in root.named_modules()
            for name, tensor in {**module._buffers, **module._parameters}.items()
            if tensor is not None and not tensor.requires_grad
        ]

    def put_back(self) -> None:
        """Undo what the passes wrote since the modules got temporary weights."""
        for kept in self._kept:
            kept.put_back()

    def written(self) -> dict[str, Tensor]:
        """Return copies of what differs now, by name, without the statistics of BatchNorm."""
        return {kept.label: kept.now().clone() for kept in self._kept if kept.is_named and kept.differs()}


class _Kept:
    """A buffer or a frozen parameter, with the memory that it had before it got temporary weights."""

    def __init__(self, module: nn.Module, prefix: str, name: str, tensor: Tensor) -> None:
        self._is_parameter = isinstance(tensor, nn.Parameter)
        self._registry: Any = module._parameters if self._is_parameter else module._buffers
        self._name = name
        self._tensor = tensor
        self._data = tensor.data
        kind = "frozen parameter" if self._is_parameter else "buffer"
        self.label = f"{kind} {'.'.join(filter(None, [prefix, name]))}"
        self.is_named = not isinstance(module, _BatchNorm)

    def now(self) -> Tensor:
        """Return the tensor that the module has now."""
        found: Tensor | None = self._registry.get(self._name)
        return torch.empty(0, device="cpu") if found is None else found.detach()

    def differs(self) -> bool:
        """Check whether a pass has written it."""
        now, before = self.now(), self._data
        if now.shape != before.shape:
            return True
        if self._is_parameter:
            stride = max(1, now.numel() // ELEMENTS)
            now, before = now.flatten()[::stride], before.flatten()[::stride]
        return not torch.equal(now, before.to(now.device, now.dtype))

    def put_back(self) -> None:
        """Undo what a pass has written."""
        if self._registry.get(self._name) is not self._tensor or self.differs():
            self._tensor.data = self._data.to(self._tensor.device, self._tensor.dtype, copy=True)
            self._registry[self._name] = self._tensor


def held_modules(loss: object, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a loss is, or refers to, by the names of their classes; none of the model."""
    own = {id(module) for module in model.modules()}
    parts = [loss.represent, loss.loss] if isinstance(loss, WholeBatchLoss) else [loss]
    found: list[object] = []
    for part in parts:
        function = part.func if isinstance(part, functools.partial) else part
        found += [function, getattr(function, "__self__", None)]
        if inspect.isfunction(function):
            used = inspect.getclosurevars(function)
            found += [*used.nonlocals.values(), *used.globals.values()]
    modules = {id(one): one for one in found if isinstance(one, nn.Module) and id(one) not in own}
    return {f"{type(one).__name__}{f' {at}' if at else ''}": one for at, one in enumerate(modules.values())}


def names_of(labels: list[str]) -> str:
    """Return what was written in words: ``the buffers queue, pointer and the frozen parameter teacher``."""
    parts = []
    for kind in ("buffer", "frozen parameter"):
        names = [label.removeprefix(f"{kind} ") for label in labels if label.startswith(f"{kind} ")]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if names:
            parts.append(f"the {kind}{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{more}")
    return " and ".join(parts)
