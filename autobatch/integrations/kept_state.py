"""Attributes of an object that user code may write while it is probed, kept as they were."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_ITEMS = 1000
"""Items of a container above which it counts as data, which are not written."""
DEPTH = 3
"""Containers within each other that are copied: for example figures by name, by mode."""


@contextmanager
def kept_state(owner: Any) -> Iterator[None]:
    """Restore the attributes of an object after the block, and what small containers among them hold.

    Losses log their figures there: a list, a count, or lists by name. Other objects are not copied.
    """
    before = {name: _copied(value, DEPTH) for name, value in vars(owner).items()}
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(before)


def _copied(value: Any, depth: int) -> Any:
    if not isinstance(value, dict | list | set | deque) or len(value) > MOST_ITEMS or not depth:
        return value
    found: Any = copy.copy(value)
    if isinstance(found, dict):
        found.update({key: _copied(one, depth - 1) for key, one in found.items()})
    elif isinstance(found, list):
        found[:] = [_copied(one, depth - 1) for one in value]
    return found
