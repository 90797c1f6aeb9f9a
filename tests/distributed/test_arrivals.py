"""Ranks that wait for each other: who is missing is named, and nobody else."""

from __future__ import annotations

from autobatch.distributed.arrivals import Arrivals
from tests.distributed.test_bell import Store


class Ranks:
    """Three ranks with one store and one clock."""

    def __init__(self) -> None:
        self.now, self.store = 0.0, Store()
        self.ranks = [Arrivals(rank, 3, 0, lambda: self.now) for rank in range(3)]
        for one in self.ranks:
            one.limit_s = 10.0

    def look(self) -> list[str | None]:
        return [one.look(self.store) for one in self.ranks]


def test_the_missing_rank_is_named() -> None:
    ranks = Ranks()
    for one in ranks.ranks:
        one.arrive()
        one.leave()
    ranks.ranks[0].arrive()
    ranks.ranks[2].arrive()
    ranks.now = 10.0
    assert ranks.look() == [None] * 3
    ranks.now = 10.1
    first, second, third = ranks.look()
    assert second is None
    assert first == third
    assert first is not None
    assert first.startswith("rank 1 lets the other ranks wait for more than the --collective-timeout of 10 s")


def test_nobody_is_named_while_all_are_there() -> None:
    ranks = Ranks()
    for one in ranks.ranks:
        one.arrive()
    ranks.look()
    ranks.now = 99.0
    assert ranks.look() == [None] * 3


def test_several_missing_ranks_are_named() -> None:
    ranks = Ranks()
    ranks.ranks[1].arrive()
    ranks.now = 11.0
    found = ranks.look()[1]
    assert found is not None
    assert found.startswith("ranks 0, 2 let the other ranks wait")
