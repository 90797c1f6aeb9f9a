"""Children that meet under a name: they sum together, and one that fails ends the others."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from autobatch.distributed import meeting
from autobatch.distributed.launch import OTHER_FAILED
from autobatch.distributed.meeting import MeetingPlace, met
from autobatch.distributed.messages import RankLost
from tests.support.rank_server import RankServer

pytestmark = pytest.mark.distributed


def place_of(name: str) -> MeetingPlace:
    """Return the place of this process, as the parent of a child would."""
    environ = os.environ
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    return MeetingPlace(address, port, name, int(environ["RANK"]), int(environ["WORLD_SIZE"]))


def sum_twice() -> list[float]:
    found = []
    for name in ("one", "two"):
        with met(place_of(name)) as children:
            total = torch.ones(1) * (children.rank + 1)
            children.all_reduce(total)
            found.append(float(total))
        assert not dist.is_initialized()
    return found


def test_children_meet_as_often_as_they_like(server: RankServer) -> None:
    assert server.values(sum_twice, world=3) == [[6.0, 6.0]] * 3


def fail_on_the_first(how: str) -> str:
    """Fail on rank 0 while rank 1 waits for it, in a collective or outside of one."""
    if how == "elsewhere":
        meeting.GRACE_S = 0.1
    try:
        with met(place_of(how)) as children:
            # Rank 0 must not fail before the other has met it.
            children.all_reduce(torch.ones(1))
            if children.rank == 0:
                raise ValueError(how)
            if how == "in a collective":
                children.all_reduce(torch.ones(1))
            time.sleep(20)
    except (ValueError, RankLost) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(("how", "code"), [("in a collective", 0), ("elsewhere", OTHER_FAILED)])
def test_a_child_that_fails_ends_the_others(server: RankServer, how: str, code: int) -> None:
    first, other = server.run(fail_on_the_first, how, seconds=20)
    assert (first.code, first.value) == (0, "ValueError")
    assert (other.code, other.value) == (code, "RankLost" if code == 0 else None)
    assert other.ended_s < 8


def test_a_place_is_plain_values() -> None:
    assert MeetingPlace(*["host", 1, "name", 0, 2]).world == 2
