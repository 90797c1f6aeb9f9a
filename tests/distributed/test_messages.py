"""Messages among real processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from autobatch.distributed import messages
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


def join_and_end() -> tuple[bool, bool, bool]:
    """Join a loop twice, then run what the end of the interpreter runs."""
    ended: list[Any] = []
    messages.atexit.register, register = ended.append, messages.atexit.register  # type: ignore[assignment]
    try:
        messages.join_loop()
        messages.join_loop()
    finally:
        messages.atexit.register = register  # type: ignore[assignment]
    joined = dist.is_initialized()
    for leave in [*ended, *ended]:
        leave()
    return joined, dist.is_initialized(), len(ended) == 1


def test_a_group_that_a_loop_made_is_left_at_the_end(server: RankServer) -> None:
    assert server.values(join_and_end, world=2) == [(True, False, True)] * 2


def join_what_a_library_made() -> list[Any]:
    alone = messages.join_existing(2)
    dist.init_process_group("gloo")
    other, found = messages.join_existing(3), messages.join_existing(2)
    assert found is not None
    gathered = found.gather(found.rank)
    dist.destroy_process_group()
    return [alone, other, gathered]


def test_only_a_group_that_exists_is_joined(server: RankServer) -> None:
    assert server.values(join_what_a_library_made, world=2) == [[None, None, [0, 1]]] * 2
