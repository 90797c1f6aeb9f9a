"""The import of modules at their first use."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def imported(name: str) -> ModuleType:
    """Import a module, and leave Python's generator as it was: rich draws from it when it is imported."""
    # Only here: the help does not need it.
    import random

    state = random.getstate()
    try:
        return import_module(name)
    finally:
        random.setstate(state)
