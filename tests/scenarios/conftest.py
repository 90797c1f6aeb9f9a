"""Settings of the tests of whole runs: pictures are drawn in tests/report only."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_pages(no_pictures: None) -> None:
    """Write every page without pictures."""
