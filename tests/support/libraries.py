"""Other training libraries, if they are installed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


def installed(library: str) -> Any:
    """Import a library, or skip the test; ignore what the library warns of during its own import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(library, exc_type=ImportError)
