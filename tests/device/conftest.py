"""Fixtures of several tests of devices."""

from __future__ import annotations

import pytest

from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A GPU that torch and NVML show."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake
