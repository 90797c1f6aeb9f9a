"""A group of real processes: messages, what rank 0 does for all, and failures that all of them learn of."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from autobatch import AutobatchError, CheckpointError, InputError
from autobatch.distributed.group import join_existing, join_loop
from autobatch.distributed.launch import open_ranks
from autobatch.distributed.launched import LaunchedGroup, check_gpus, meet
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group


def exchange() -> list[Any]:
    """Exchange messages; a write that fails on rank 0 fails on all."""
    ranks = open_group()

    def fail() -> None:
        raise CheckpointError("the disk is full")

    found = [
        ranks.gather({"rank": ranks.rank, "text": "x" * ranks.rank}),
        ranks.broadcast(f"of {ranks.rank}"),
        ranks.once(lambda: f"by {ranks.rank}"),
        ranks.agree(ranks.rank == 1),
        ranks.agree(False),
        ranks.gather(""),
    ]
    try:
        ranks.once(fail)
    except CheckpointError as error:
        found.append(str(error))
    ranks.close()
    return found


@pytest.mark.distributed
def test_ranks_exchange_messages(server: RankServer) -> None:
    texts = [{"rank": r, "text": "x" * r} for r in range(3)]
    expected = [texts, "of 0", "by 0", True, False, ["", "", ""], "the disk is full"]
    assert server.values(exchange, world=3) == [expected] * 3


def join_what_a_library_made() -> list[Any]:
    alone = join_existing(2)
    dist.init_process_group("gloo")
    other, found = join_existing(3), join_existing(2)
    assert found is not None
    gathered = found.gather(found.rank)
    dist.destroy_process_group()
    return [alone, other, gathered]


def join_and_end() -> tuple[int, bool]:
    """Join a loop twice, then run what the end of the interpreter runs."""
    ended: list[Any] = []
    atexit.register = ended.append  # type: ignore[assignment]
    for _ in range(2):
        join_loop().gather(None)
    for leave in [*ended, *ended]:
        leave()
    return len(ended), dist.is_initialized()


@pytest.mark.distributed
def test_a_loop_joins_a_group_that_exists_and_leaves_its_own(server: RankServer) -> None:
    assert server.values(join_what_a_library_made) == [[None, None, [0, 1]]] * 2
    assert server.values(join_and_end) == [(1, False)] * 2


def fails_on_one(out: str, code: int) -> None:
    ranks = open_ranks(os.environ)
    ranks.enter(Path(out))
    ranks.gather(None)
    if ranks.rank == 1:
        assert ranks.fail("memory ran out", code) is None
        os._exit(code)
    try:
        ranks.gather(None)
    except AutobatchError as error:
        os._exit(ranks.fail(str(error), 1) or 1)


@pytest.mark.distributed
def test_all_ranks_leave_with_the_code_of_the_first_failure(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(fails_on_one, str(tmp_path), 77, world=3)
    assert [one.code for one in ended] == [77, 77, 77]
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["rank"], verdict["code"], verdict["line"]) == (1, 77, "memory ran out")


def later_start(out: str, code: int) -> str:
    """Start again after a start that failed with an exit code."""
    ranks = open_ranks(os.environ)
    ranks.enter(Path(out))
    ranks.gather(None)
    ranks.fail("the line", code)
    try:
        again = open_ranks(os.environ)
        again.gather(None)
        return str(again.earlier_out)
    except AutobatchError as error:
        return f"{type(error).__name__} {error}"


@pytest.mark.distributed
@pytest.mark.parametrize("code", [1, 2, 77])
def test_only_what_a_restart_cannot_change_ends_it(server: RankServer, tmp_path: Path, code: int) -> None:
    said = "EarlierVerdict the line" if code == 2 else str(tmp_path)
    assert server.values(later_start, str(tmp_path), code) == [said] * 2


LIMIT_S = 1.5
"""Limit of a wait, which a busy machine does not exceed."""


def open_limited(out: str) -> LaunchedGroup:
    group = open_group()
    assert isinstance(group, LaunchedGroup)
    group.enter(Path(out))
    group.gather(None)
    group.limit_wait(LIMIT_S)
    return group


def killed(group: LaunchedGroup) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.agree(False)


def hangs(group: LaunchedGroup) -> None:
    if group.rank == 1:
        time.sleep(100)
    group.agree(False)


def stop(out: str) -> None:
    """Stop this process with all of its threads, for longer than the others live."""
    time.sleep(LIMIT_S)
    wake = f"until [ -s {out}/verdict.json ]; do sleep 0.1; done; kill -KILL {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_alone(group: LaunchedGroup) -> None:
    """Stop rank 0 while the others wait for what it does alone."""
    group.once(lambda: stop(str(group._out)))


def killed_after_long_work(group: LaunchedGroup) -> None:
    """Work on rank 0 alone for longer than the limit, and lose rank 2 then."""
    group.once(lambda: time.sleep(3 * LIMIT_S))
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    group.agree(False)


def act_and_leave(out: str, act: Callable[[LaunchedGroup], None]) -> None:
    """Leave as a command does if a rank does not answer."""
    group = open_limited(out)
    try:
        act(group)
    except AutobatchError as error:
        os._exit(group.fail(str(error), 1) or 1)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("act", "missing"),
    [
        (killed, 1),
        pytest.param(hangs, 1, marks=pytest.mark.program),
        (stopped_alone, 0),
        pytest.param(killed_after_long_work, 2, marks=pytest.mark.program),
    ],
)
def test_a_rank_that_is_missing_is_named(server: RankServer, tmp_path: Path, act: Any, missing: int) -> None:
    """Of three ranks, whatever is between them: one of the others reports, and all leave."""
    ended = server.run(act_and_leave, str(tmp_path), act, world=3, seconds=40)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["line"].startswith(f"rank {missing} ended, hangs or cannot be reached")
    assert (verdict["rank"] != missing, verdict["code"]) == (True, 1)
    assert [one.code for rank, one in enumerate(ended) if rank != missing] == [1, 1]


def interrupted_start() -> str:
    """Wait for a rank that never starts, and get a signal."""
    if os.environ["RANK"] == "1":
        return "never joins"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        open_ranks(os.environ)
    except KeyboardInterrupt:
        return "interrupted"
    return "joined"


@pytest.mark.distributed
def test_ctrl_c_ends_the_wait_at_the_start(server: RankServer) -> None:
    assert server.values(interrupted_start) == ["interrupted", "never joins"]


def test_ranks_of_one_start_meet_whatever_an_earlier_one_has_left() -> None:
    """A rank whose place another process has had waits for the next start."""
    store = HashStore()
    for number in (1, 2, 3):
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(meet, store, 1, 2, 10)
            time.sleep(0.1)
            assert not early.done()
            assert meet(store, 0, 2, 10) == early.result() == number


@pytest.mark.parametrize(("rank", "missing"), [(0, "rank 1"), (1, "ranks 0, 1, 2")])
def test_ranks_that_never_start_are_named(rank: int, missing: str) -> None:
    store = HashStore()
    store.set("start/1/token/2", "token")
    with pytest.raises(AutobatchError, match=f"WORLD_SIZE is 3, and {missing} did not start within 0 s"):
        meet(store, rank, 3, 0)


def test_ranks_never_share_a_gpu() -> None:
    with pytest.raises(InputError, match=r"ranks 0 and 2 share one GPU of b"):
        check_gpus([("b", "x"), ("a", "x"), ("b", "x")])
    check_gpus([("b", "x"), ("b", "y"), ("c", "x"), ("d", None), ("d", None)])
