"""One warm server of ranks for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_server import RankServer, rank_server


@pytest.fixture(scope="session", name="server")
def opened_server() -> Iterator[RankServer]:
    with rank_server() as server:
        yield server
