"""Messages among real processes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from autobatch.distributed.ranks import open_ranks
from tests.support.rank_server import RankServer

pytestmark = pytest.mark.distributed


def exchange() -> list[Any]:
    ranks = open_ranks(os.environ)
    found = [
        ranks.gather({"rank": ranks.rank, "text": "x" * ranks.rank}),
        ranks.once(lambda: f"of {ranks.rank}"),
        ranks.agree(ranks.rank == 1),
        ranks.agree(False),
        ranks.gather(""),
    ]
    ranks.close()
    return found


def test_ranks_exchange_messages(server: RankServer) -> None:
    expected = [[{"rank": r, "text": "x" * r} for r in range(3)], "of 0", True, False, ["", "", ""]]
    assert server.values(exchange, world=3) == [expected] * 3
