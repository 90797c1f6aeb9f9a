"""The agreement of ranks on an out-of-memory error: the limits of the kinds that failed, and nothing else."""

from __future__ import annotations

from typing import Any, cast

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group import Group
from autobatch.distributed.group_engine import GroupEngine
from autobatch.distributed.shares import RankSplit
from autobatch.workload.split import CountSplit


class FakeGroup:
    """A rank that hears what three ranks say."""

    world = 3

    def __init__(self, rank: int, said: list[OutOfMemory]) -> None:
        self.rank = rank
        self.said = [list(one) for one in said]

    def gather(self, value: Any) -> list[Any]:
        assert value == self.said[self.rank]
        return self.said


def settle(said: list[OutOfMemory], *, may_repeat: bool = False) -> tuple[list[OutOfMemory], list[int]]:
    """Settle on every rank; return what each answers, and the limits that all of them have then."""
    answers, limits = [], []
    for rank, own in enumerate(said):
        split = RankSplit(CountSplit(), rank, [8, 3, 8])
        engine = GroupEngine(cast("Group", FakeGroup(rank, said)), split, [0, 1, 0])
        answers.append(engine.settle(own, may_repeat=may_repeat))
        limits.append(engine.limits)
    assert limits[0] == limits[1] == limits[2]
    return answers, limits[0]


def test_the_limit_of_the_kind_that_failed_halves() -> None:
    answers, limits = settle([OutOfMemory(""), OutOfMemory(""), OutOfMemory("full", size=8, smaller=4)])
    assert limits == [4, 3, 4]
    assert [one.smaller for one in answers] == limits
    assert {(one.message, one.size) for one in answers} == {("rank 2: full", 8)}


def test_fragmentation_alone_keeps_the_limits_once() -> None:
    said = [OutOfMemory("full", is_fragmented=True, size=8, smaller=4), OutOfMemory(""), OutOfMemory("")]
    answers, limits = settle(said, may_repeat=True)
    assert limits == [8, 3, 8]
    assert all(one.is_fragmented for one in answers)
    assert settle(said)[1] == [4, 3, 4]


def test_one_rank_that_cannot_continue_decides_for_all() -> None:
    said = [OutOfMemory(""), OutOfMemory("lost", is_fatal=True, is_intact=False, size=3, smaller=2)]
    answers, limits = settle([*said, OutOfMemory("")])
    assert limits == [8, 2, 8]
    assert all(one.is_fatal and not one.is_intact for one in answers)


def test_a_micro_batch_is_blamed_rather_than_the_loss_over_the_batch() -> None:
    loss = OutOfMemory("full", is_fragmented=True, size=19, smaller=8, is_in_loss=True)
    said = [loss, OutOfMemory("short", size=2, smaller=1), OutOfMemory("")]
    answers, limits = settle(said)
    assert limits == [8, 1, 8]
    assert {(one.message, one.size, one.is_in_loss) for one in answers} == {("rank 1: short", 2, False)}
    answers, limits = settle([loss, OutOfMemory(""), OutOfMemory("")])
    assert limits == [8, 3, 8]
    assert {(one.message, one.size, one.is_in_loss) for one in answers} == {("rank 0: full", 19, True)}
