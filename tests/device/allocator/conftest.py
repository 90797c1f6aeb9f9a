"""A fixture of the tests that count memory."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture
def no_garbage_collection():
    """Frees must come from reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
