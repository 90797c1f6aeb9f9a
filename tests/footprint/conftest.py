"""Fixtures of the tests of footprints."""

from __future__ import annotations

import os

import pytest

from autobatch.footprint.tracing.apart import run_apart


@pytest.fixture
def real_copies(copies: None) -> None:
    """Skip a test that needs a copy of this process where none answers (engine.cpp, bad autograd fork)."""
    if run_apart(os.getpid) == os.getpid():
        pytest.skip("a CUDA build of torch refuses autograd in a copy once it ran here")
