"""Calls that rank 0 asks for."""

from __future__ import annotations

from typing import Any

import pytest

from autobatch.setup.child import ChildCrashed
from autobatch.tuning.lead import OTHER_ENDED, answer, ask, failed_rank, follow, reason_of
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group


def test_a_rank_with_a_reason_of_its_own_has_failed() -> None:
    assert failed_rank([None, None]) is None
    assert failed_rank([OTHER_ENDED, None, "full"]) == 2
    assert failed_rank([None, OTHER_ENDED]) == 1


def test_a_child_that_left_after_another_had_failed_has_no_reason_of_its_own() -> None:
    assert reason_of(ChildCrashed("exit code 76", after_other=True)) == OTHER_ENDED
    assert reason_of(ChildCrashed("SIGKILL")) == "SIGKILL"


def multiply() -> Any:
    group = open_group()

    def run(act: str, asked: float) -> list[Any]:
        return [act, asked * (group.rank + 1)]

    found = follow(group, run) if group.rank else [ask(group, run, "double", 2), ask(group, run, "again", 3)]
    if not group.rank:
        answer(group, found)
    group.close()
    return found


@pytest.mark.distributed
def test_all_ranks_do_what_rank_0_asks_for_and_know_its_answer(server: RankServer) -> None:
    first, second = server.values(multiply)
    assert first == second == [[["double", 2], ["double", 4]], [["again", 3], ["again", 6]]]
