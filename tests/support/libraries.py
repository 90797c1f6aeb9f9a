"""Other training libraries, if they are installed."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest


def installed(library: str) -> Any:
    """Import a library, or skip the test; ignore what the library warns of during its own import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(library, exc_type=ImportError)


def imports_library(module: ModuleType, library: str) -> bool:
    """Check whether a module holds anything of a library."""
    return any(
        getattr(value, "__name__", "").split(".")[0] == library
        or getattr(value, "__module__", "").split(".")[0] == library
        for value in vars(module).values()
    )
