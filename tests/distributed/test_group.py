"""A group of real processes: messages, what rank 0 does for all, and failures that all of them learn of."""

from __future__ import annotations

import atexit
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autobatch import AutobatchError, InputError
from autobatch.distributed.group import LaunchedGroup, join_existing, join_loop
from autobatch.distributed.launch import open_ranks
from autobatch.distributed.ranks import Ranks, read_launch
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group

ENVIRON = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}
LIMIT_S = 4.0
"""Limit of a wait, which a busy machine does not exceed, longer than a roll call of tests."""
LOST = 1
"""Rank of three that is lost, between two others that wait for each other, too."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "2"}, "RANK is 2, and WORLD_SIZE is 2"),
        ({"RANK": None}, "field .RANK"),
        ({"WORLD_SIZE": "many"}, "'many'"),
        ({"MASTER_ADDR": None}, "field .MASTER_ADDR"),
    ],
)
def test_an_invalid_environment_is_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**ENVIRON, **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        open_ranks(environ)


def test_a_rank_has_its_place_on_its_host_also_from_a_launcher_that_gives_none() -> None:
    environ = {**ENVIRON, "WORLD_SIZE": "8", "RANK": "6", "LOCAL_WORLD_SIZE": "4"}
    for more, place in ({}, 2), ({"LOCAL_RANK": "3"}, 3):
        assert read_launch(environ | more).local_rank == place


def test_a_launcher_reads_the_line_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    for place in (path, "/dev/null/error.json"):  # which cannot be written
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place))
        assert Ranks().fail("line", 1) is None
    found = json.loads(path.read_text())
    assert found["message"] == "line"
    assert found["timestamp"].isdecimal()


def join_and_end() -> tuple[Any, ...]:
    """Join a loop twice, then run what the end of the interpreter runs."""
    ended: list[Any] = []
    atexit.register = ended.append  # type: ignore[assignment]
    alone = join_existing(2)
    gathered = [join_loop().gather(dist.get_rank()) for _ in range(2)]
    other = join_existing(3)
    for leave in [*ended, *ended]:
        leave()
    return alone.world, gathered, other.world, len(ended), dist.is_initialized()


@pytest.mark.distributed
def test_a_loop_joins_a_group_that_exists_and_leaves_its_own(server: RankServer) -> None:
    assert server.values(join_and_end) == [(1, [[0, 1]] * 2, 1, 1, False)] * 2


def fail_in_turn(out: str) -> tuple[int | None, str]:
    """Fail on rank 1, which the others notice; return their codes, and what a second start finds."""
    ranks = open_group()
    ranks.enter(Path(out), Path(out, "mark"))
    assert ranks.agree(ranks.rank == 1)
    if ranks.rank == 1:
        found = ranks.fail("memory ran out", 77)
        dist.destroy_process_group()
    else:
        try:
            ranks.gather(None)
        except AutobatchError as error:
            found = ranks.fail(str(error), 1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    again = open_group()
    again.gather(None)
    return found, str(again.earlier_out)


@pytest.mark.distributed
def test_the_first_failure_counts_and_a_restart_knows_the_folder(server: RankServer, tmp_path: Path) -> None:
    found = server.values(fail_in_turn, str(tmp_path), world=3)
    assert found == [(77, str(tmp_path)), (None, str(tmp_path)), (77, str(tmp_path))]
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["rank"], verdict["code"], verdict["line"]) == (1, 77, "memory ran out")


def work_in_turn() -> list[int]:
    """Let rank 0 work several times, while the last rank comes late."""
    group = open_group()
    if group.rank == group.world - 1:
        time.sleep(1)
    return [group.once(lambda number=number: number) for number in range(4)]  # type: ignore[misc]


@pytest.mark.distributed
def test_a_late_rank_hears_of_all_work_of_rank_0(server: RankServer) -> None:
    """Of eight ranks, some get the answers of rank 0 from others, while it works on."""
    assert server.values(work_in_turn, world=8) == [[0, 1, 2, 3]] * 8


def killed(group: LaunchedGroup) -> None:
    """Lose a rank in a sum, after work of rank 0 that takes much longer than the limit."""
    group.once(lambda: time.sleep(2.5 * LIMIT_S))
    if group.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    group.sum([torch.zeros(10**6), torch.zeros(3)], "sum the gradients")


def hangs(group: LaunchedGroup) -> None:
    """Let rank 0 work alone, and again while another rank hangs."""
    group.once(lambda: None)
    if group.rank == LOST:
        time.sleep(100)
    group.once(lambda: None)


def stopped(group: LaunchedGroup) -> None:
    """Stop rank 0 in its work for all, after a sign of life."""

    def work() -> None:
        time.sleep(LIMIT_S / 2)
        os.kill(os.getpid(), signal.SIGSTOP)

    group.once(work)


class SilentStore:
    """A store whose host is cut off."""

    def set(self, *_: Any) -> None:
        time.sleep(1000)

    compare_set = set


def cut_off(group: LaunchedGroup) -> None:
    """Lose a rank and the store."""
    group._start = SilentStore()  # type: ignore[assignment]
    killed(group)


def act_and_leave(out: str, act: Callable[[LaunchedGroup], None]) -> None:
    """Leave as a command does if a rank does not answer."""
    group, mark = open_group(LIMIT_S), Path(out, "mark")
    mark.touch()
    group.enter(Path(out), mark)
    try:
        act(group)
    except AutobatchError as error:
        os._exit(group.fail(str(error), 1) or 1)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("act", "lost"),
    [
        (killed, LOST),
        pytest.param(hangs, LOST, marks=pytest.mark.program),
        pytest.param(stopped, 0, marks=pytest.mark.program),
    ],
)
def test_a_rank_that_is_missing_is_named(
    server: RankServer, tmp_path: Path, act: Callable[[LaunchedGroup], None], lost: int
) -> None:
    """Of three ranks, whatever is between them: one of the others reports, and all leave."""
    ended = server.run(act_and_leave, str(tmp_path), act, world=3, seconds=20)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["line"].startswith(f"rank {lost} ended, hangs or cannot be reached"), verdict
    assert (verdict["rank"] != lost, verdict["code"]) == (True, 1)
    assert [one.code for rank, one in enumerate(ended) if rank != lost] == [1, 1]


@pytest.mark.program
@pytest.mark.distributed
def test_a_rank_that_cannot_reach_the_store_leaves_too(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(act_and_leave, str(tmp_path), cut_off, world=3, seconds=40)
    assert [one.code for one in ended][:: LOST + 1] == [1, 1]
    assert json.loads((tmp_path / "verdict.json").read_text())["line"].startswith("rank 0, or another")


def fail_late(folder: str) -> list[str | None]:
    """Fail without a store, as a rank that was stopped does; return the line that its folder has then."""
    group, found = open_group(), list[str | None]()
    out = Path(folder, str(group.rank))
    out.mkdir()
    mark, verdict = out / "mark", out / "verdict.json"
    group.enter(out, mark)
    group._has_store = False
    for line in "another start has the folder", "first", "second":
        assert group.fail(line, 1) is None
        found.append(json.loads(verdict.read_text())["line"] if verdict.exists() else None)
        mark.touch()
    return found


@pytest.mark.distributed
def test_a_late_failure_replaces_no_other_and_belongs_to_no_other_start(
    server: RankServer, tmp_path: Path
) -> None:
    assert server.values(fail_late, str(tmp_path)) == [[None, "first", "first"]] * 2
