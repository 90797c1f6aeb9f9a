"""Other training libraries, if they are installed."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest


def installed(library: str) -> Any:
    """Import a library, or skip the test; ignore what the library warns of during its own import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(library, exc_type=ImportError)


def lazily(name: str) -> ModuleType:
    """Return a module that is imported when it is first used: of two workers only one needs it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
