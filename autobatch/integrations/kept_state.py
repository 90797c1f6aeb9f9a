"""The state of a user's objects that a probe runs on, put back when it ends."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 3
"""Values within each other that are put back: for example figures by name, by mode."""
MOST_ITEMS = 1000
"""Items of a container above which it counts as data, which user code does not write."""
MOST_ELEMENTS = 1 << 20
"""Elements of a tensor above which it counts as data."""
_PLAIN = (Tensor, dict, list, set, deque, tuple, int, float, complex, str, bytes, type(None))
"""Attributes of an object that is no more than its values, such as a meter."""


@contextmanager
def kept_state(*owners: Any) -> Iterator[None]:
    """Put back at the end of the block what objects hold: their attributes, and the values within those.

    Losses log their figures there: a list, a count, a metric. Each object stays the same one, because others
    may refer to it. Parameters are left to the probe, which runs on copies of them.

    Args:
        owners: the user's objects. Of a model, these are all of its modules; of a method, its object.
    """
    held: list[tuple[Any, Any]] = []
    seen: dict[int, int] = {}
    for owner in owners:
        holder = owner.__self__ if isinstance(owner, MethodType) else owner
        for part in holder.modules() if isinstance(holder, nn.Module) else [holder]:
            _hold(getattr(part, "__dict__", None), DEPTH, seen, held)
    try:
        yield
    finally:
        for value, content in held:
            _put_back(value, content)


def _hold(value: Any, depth: int, seen: dict[int, int], held: list[tuple[Any, Any]]) -> None:
    """List a value and the values within it, each with a copy of its content; ``seen`` has their depths."""
    if seen.get(id(value), -1) >= depth or isinstance(value, nn.Parameter | nn.Module):
        return
    seen[id(value)] = depth
    if isinstance(value, Tensor):
        if value.numel() <= MOST_ELEMENTS and not value.is_meta:
            held.append((value, value.detach().clone()))
    elif isinstance(value, dict | list | set | deque):
        if len(value) > MOST_ITEMS:
            return
        held.append((value, dict(value) if isinstance(value, dict) else list(value)))
        if depth:
            for part in _items(value):
                _hold(part, depth - 1, seen, held)
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and all(isinstance(part, _PLAIN) for part in attributes.values()):
            _hold(attributes, depth, seen, held)


def _put_back(value: Any, content: Any) -> None:
    """Give a value its content again; one that has not changed is not touched."""
    if isinstance(value, Tensor):
        if not torch.equal(value, content):
            with torch.no_grad():
                value.copy_(content)
        return
    now, before = _items(value), _items(content)
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)


def _items(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else [*value]
