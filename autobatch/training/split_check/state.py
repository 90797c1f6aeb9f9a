"""State that a forward pass writes besides gradients: named, and put back between two passes of the check.

Buffers, frozen parameters and attributes of the model, and of modules that the loss holds. What a loss keeps
elsewhere (in a closure, in a list) is not known here.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.workload.contract import WholeBatchLoss

NAMED = 4
"""Names that a message lists of each kind."""
ELEMENTS = 1024
"""Elements of a frozen parameter that are compared: a pass that writes one writes all of it."""
PLAIN = (bool, int, float, str, type(None), Tensor)
CONTAINERS = (list, dict, set, deque)


class PassState:
    """What the passes over some modules may write.

    Args:
        modules: by the name that a message calls them, empty for the model. They are given as they are before
            they get temporary weights.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._tensors: list[_Kept] = []
        self._attributes: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for owner, root in modules.items():
            for path, module in root.named_modules():
                prefix = ".".join(filter(None, [owner, path]))
                self._tensors += _kept_tensors(module, prefix)
                self._attributes.append((prefix, module, _plain_attributes(module)))
                values = list(vars(module).values())
                self._generators += [(g, g.get_state()) for g in values if isinstance(g, torch.Generator)]
        attributes = [value for _, _, own in self._attributes for value in own.values()]
        self._contents = [(one, one.clone()) for one in attributes if isinstance(one, Tensor)]

    def put_back(self) -> None:
        """Undo what the passes wrote since the modules got temporary weights."""
        with torch.no_grad():
            for kept in self._tensors:
                kept.put_back()
            for tensor, content in self._contents:
                tensor.copy_(content)
        for _, module, attributes in self._attributes:
            for name, value in attributes.items():
                if not _is_same(vars(module).get(name), value):
                    vars(module)[name] = copy.copy(value) if isinstance(value, CONTAINERS) else value

    def end(self) -> None:
        """Undo what the passes wrote, and put back the generators that modules have of their own."""
        self.put_back()
        for generator, state in self._generators:
            generator.set_state(state)

    def written(self) -> dict[str, Tensor]:
        """Return copies of the buffers and frozen parameters that differ now, by name; not of BatchNorm."""
        return {kept.label: kept.now().clone() for kept in self._tensors if kept.is_named and kept.differs()}

    def changed_attributes(self) -> list[str]:
        """Return the attributes that differ now, as `names_of` reads them."""
        contents = {id(tensor): content for tensor, content in self._contents}
        return [
            f"attribute {'.'.join(filter(None, [prefix, name]))}"
            for prefix, module, attributes in self._attributes
            for name, value in attributes.items()
            if not _is_same(vars(module).get(name), value)
            or (isinstance(value, Tensor) and not torch.equal(value, contents[id(value)]))
        ]


class _Kept:
    """A buffer or a frozen parameter, with the memory that it had before it got temporary weights."""

    def __init__(self, module: nn.Module, prefix: str, name: str, tensor: Tensor) -> None:
        self._registry: Any = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
        self._name = name
        self._tensor = tensor
        self._data = tensor.data
        kind = "frozen parameter" if isinstance(tensor, nn.Parameter) else "buffer"
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
        if isinstance(self._tensor, nn.Parameter):
            stride = max(1, now.numel() // ELEMENTS)
            now, before = now.flatten()[::stride], before.flatten()[::stride]
        return not torch.equal(now, before.to(now.device, now.dtype))

    def put_back(self) -> None:
        """Undo what a pass has written."""
        if self._registry.get(self._name) is self._tensor and not self.differs():
            return
        dtype = self._tensor.dtype
        self._tensor.data = self._data.to(self._tensor.device, dtype, copy=True)
        self._registry[self._name] = self._tensor


def held_modules(loss: object, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a loss holds, by the names of their classes, without those of the model.

    They are found where a function holds what it uses: in its class, its arguments, its closure, its globals.
    """
    own = {id(module) for module in model.modules()}
    found = {id(one): one for one in _modules_in(loss, 4) if id(one) not in own}
    names: dict[str, nn.Module] = {}
    for module in found.values():
        name = type(module).__name__
        names[f"{name} {len(names)}" if name in names else name] = module
    return names


def names_of(labels: list[str]) -> str:
    """Return what was written in words: ``the buffers queue, pointer and the frozen parameter teacher``."""
    parts = []
    for kind in ("buffer", "frozen parameter", "attribute"):
        names = [label.removeprefix(f"{kind} ") for label in labels if label.startswith(f"{kind} ")]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if names:
            parts.append(f"the {kind}{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{more}")
    return " and ".join(parts)


def _modules_in(value: object, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that a function, or an object that is called, refers to."""
    if isinstance(value, nn.Module):
        yield value
        return
    inner: list[object] = []
    if isinstance(value, WholeBatchLoss):
        inner = [value.represent, value.loss]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        names = value.__code__.co_names
        inner = [value.__globals__[name] for name in names if name in value.__globals__]
        inner += [_content(cell) for cell in value.__closure__ or ()]
    elif hasattr(value, "__self__"):
        inner = [value.__self__, getattr(value, "__func__", None)]
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        inner = list(vars(value).values())
    for one in inner:
        if depth and (callable(one) or isinstance(one, nn.Module)):
            yield from _modules_in(one, depth - 1)


def _content(cell: Any) -> object:
    """Return the content of a cell of a closure; None if it has none yet."""
    try:
        content: object = cell.cell_contents
    except ValueError:
        return None
    return content


def _kept_tensors(module: nn.Module, prefix: str) -> list[_Kept]:
    frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    return [_Kept(module, prefix, name, tensor) for name, tensor in {**buffers, **frozen}.items()]


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that a pass may write, containers as copies of their own."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, PLAIN):
            found[name] = value
        elif isinstance(value, CONTAINERS):
            found[name] = copy.copy(value)
    return found


def _is_same(now: Any, before: Any) -> bool:
    """Check that an attribute is the object that it was, or a container of the same objects."""
    if now is before:
        return True
    if isinstance(before, Tensor) or isinstance(now, Tensor) or type(now) is not type(before):
        return False
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in before)
    if isinstance(before, list | deque):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return bool(now == before)
