"""A group of real processes: what rank 0 does for all, and failures that all of them hear."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time
from pathlib import Path

import msgspec
import pytest

from autobatch.core.errors import CheckpointError, InputError
from autobatch.core.signals import stop_on_signals
from autobatch.distributed import bell
from autobatch.distributed.bell import Verdict, read_verdict
from autobatch.distributed.messages import RankLost
from autobatch.distributed.ranks import Ranks, open_ranks
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group

pytestmark = pytest.mark.distributed


def failing_once() -> str:
    ranks = open_ranks(os.environ)

    def act() -> None:
        raise CheckpointError("the disk is full")

    try:
        ranks.once(act)
    except CheckpointError as error:
        ranks.close()
        return str(error)
    return ""


def test_a_failed_write_fails_on_every_rank(server: RankServer) -> None:
    assert server.values(failing_once) == ["the disk is full"] * 2


def wait_in_a_collective(ranks: Ranks) -> None:
    ranks.gather(None)


def test_all_ranks_leave_with_the_code_of_the_first_failure(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(fails_then_leaves, str(tmp_path), 77, world=3)
    assert [one.code for one in ended] == [77, 77, 77]
    assert max(ended[0].ended_s, ended[2].ended_s) < ended[1].ended_s
    verdict = msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict)
    assert (verdict.rank, verdict.code, verdict.line) == (1, 77, "memory ran out")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fails_then_leaves(out: str, code: int) -> None:
    ranks = open_ranks(os.environ)
    ranks.enter(Path(out))
    others = [pid for pid in ranks.gather(os.getpid()) if pid != os.getpid()]
    if ranks.rank == 1:
        assert ranks.fail("memory ran out", code) is None
        while any(is_running(pid) for pid in others):  # it holds its sockets, so that only the bell ends them
            time.sleep(0.01)
        time.sleep(0.05)
        os._exit(code)
    wait_in_a_collective(ranks)


def later_start() -> str:
    environ = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1"}
    ranks = open_ranks(os.environ)
    ranks.gather(None)
    if ranks.rank == 0:
        ranks.fail("a wrong option", 2)
    else:
        ranks._bell.close()  # type: ignore[union-attr]
        while read_verdict(ranks._store, 0) is None:  # type: ignore[union-attr]
            time.sleep(0.01)
    try:
        open_ranks(environ)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_restart_ends_at_once_after_invalid_input(server: RankServer) -> None:
    assert server.values(later_start) == ["EarlierVerdict a wrong option"] * 2


def keep_the_store() -> str:
    """Keep the store in rank 0, as without torchrun, at a port where something listens."""
    if os.environ["RANK"] == "1":
        return ""
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
        try:
            open_ranks({**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port})
        except InputError as error:
            return str(error)
    return ""


def test_a_port_that_is_taken_is_named(server: RankServer) -> None:
    line, _ = server.values(keep_the_store)
    assert re.fullmatch(r"MASTER_PORT is \d+, which another process of .* uses: give another", line)


def one_dies() -> None:
    ranks = open_ranks(os.environ)
    ranks.gather(None)
    if ranks.rank == 1:
        os.kill(os.getpid(), 9)
    wait_in_a_collective(ranks)


def test_a_rank_that_is_killed_is_noticed(server: RankServer) -> None:
    ended = server.run(one_dies)
    assert [one.code for one in ended] == [1, -9]
    assert (
        "RankLost: a rank ended or cannot be reached, so this one could not exchange messages"
        in ended[0].error
    )


def one_ends_at_once() -> int | None:
    """Lose a rank that a second signal ended, as a launcher sends both to all."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    group = open_group()
    with stop_on_signals(itertools.count().__next__):
        group.gather(None)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            group.gather(None)
        except RankLost as error:
            return group.fail(str(error), 1)
        except KeyboardInterrupt:
            group.fail("interrupted", 130)
            raise
    return None


def test_a_rank_that_a_second_signal_ended_is_no_failure(server: RankServer) -> None:
    """The ranks that lose it end with its exit code, whether they hear the bell or notice the loss first."""
    first, other = server.run(one_ends_at_once)
    assert first.code == 130 or first.value == 130, first.error
    assert "KeyboardInterrupt" in other.error


def one_hangs(out: str) -> None:
    group = open_group()
    group.enter(Path(out))
    bell.POLL_S = 0.05
    for _ in range(2):
        with group.meeting():
            group.agree(False)
    group.limit_wait(0.5)
    if group.rank == 1:
        time.sleep(25)
    with group.meeting():
        group.agree(False)


@pytest.mark.parametrize("world", [3])
def test_a_rank_that_hangs_is_named(server: RankServer, tmp_path: Path, world: int) -> None:
    ended = server.run(one_hangs, str(tmp_path), world=world)
    assert [one.code for one in ended] == [1] * world
    verdict = msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.line.startswith("rank 1 lets the other ranks wait for more than")
    assert verdict.rank != 1
