"""A group of real processes: messages, what rank 0 does for all, and failures that all of them learn of."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from autobatch import AutobatchError, CheckpointError, InputError
from autobatch.core.signals import Arrivals, stop_on_signals
from autobatch.distributed import watch
from autobatch.distributed.group import (
    Group,
    check_gpus,
    join_existing,
    join_loop,
    meet,
    reach_store,
)
from autobatch.distributed.launch import open_ranks, open_store
from autobatch.distributed.ranks import Launch
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
        while any(is_running(pid) for pid in others):  # its sockets stay open: the verdict ends them
            time.sleep(0.01)
        time.sleep(0.05)
        os._exit(code)
    ranks.gather(None)


@pytest.mark.distributed
def test_all_ranks_leave_with_the_code_of_the_first_failure(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(fails_then_leaves, str(tmp_path), 77, world=3)
    assert [one.code for one in ended] == [77, 77, 77]
    assert max(ended[0].ended_s, ended[2].ended_s) < ended[1].ended_s
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["rank"], verdict["code"], verdict["line"]) == (1, 77, "memory ran out")


def later_start(code: int) -> str:
    """Start again after a start that failed with an exit code."""
    ranks = open_ranks(os.environ)
    ranks.gather(None)
    ranks.fail("the line", code)
    try:
        return str(open_ranks({**os.environ, "TORCHELASTIC_RESTART_COUNT": "1"}).gather("meet"))
    except Exception as error:
        return f"{type(error).__name__} {error}"


@pytest.mark.distributed
@pytest.mark.parametrize("code", [1, 2, 3, 77])
def test_only_what_a_restart_cannot_change_ends_it(server: RankServer, code: int) -> None:
    said = "EarlierVerdict the line" if code in (2, 3) else "['meet', 'meet']"
    assert server.values(later_start, code) == [said] * 2


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


@pytest.mark.distributed
def test_a_port_that_is_taken_is_named(server: RankServer) -> None:
    line, _ = server.values(keep_the_store)
    assert re.fullmatch(r"MASTER_PORT is \d+, which another process of .* uses: give another", line)


def one_dies() -> None:
    ranks = open_ranks(os.environ)
    ranks.gather(None)
    if ranks.rank == 1:
        os.kill(os.getpid(), 9)
    ranks.gather(None)


@pytest.mark.distributed
def test_a_rank_that_is_killed_is_noticed(server: RankServer) -> None:
    ended = server.run(one_dies)
    assert [one.code for one in ended] == [1, -9]
    line = "RankLost: a rank ended or cannot be reached, so this one could not exchange messages"
    assert line in ended[0].error


def one_ends_at_once() -> int | None:
    """Lose a rank that a second signal ended, as a launcher sends both to all."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    group = open_group()
    with stop_on_signals(Arrivals(itertools.count().__next__)):
        group.gather(None)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            group.gather(None)
        except AutobatchError as error:
            return group.fail(str(error), 1)
        except KeyboardInterrupt:
            group.fail("interrupted", 130)
            raise
    return None


@pytest.mark.distributed
def test_a_rank_that_a_second_signal_ended_is_no_failure(server: RankServer) -> None:
    """The ranks that lose it end with its exit code, whatever they notice first."""
    first, other = server.run(one_ends_at_once)
    assert first.code == 130 or first.value == 130, first.error
    assert "KeyboardInterrupt" in other.error


def open_watched(out: str) -> Group:
    """Join with a limit of 1.5 seconds for every wait, which a busy machine does not exceed."""
    watch.POLL_S = 0.05
    group = open_group()
    group.enter(Path(out))
    group.gather(None)
    group.limit_wait(1.5)
    return group


def hangs_on_its_own(out: str) -> None:
    group = open_watched(out)

    def save() -> None:
        group.sign("saving a checkpoint")
        time.sleep(100)

    group.once(save)


def is_stopped(out: str) -> None:
    """Stop rank 1 with all of its threads, for longer than the others live."""
    group = open_watched(out)
    if group.rank == 1:
        group.sign("validating")
        time.sleep(4 * watch.POLL_S)
        wake = f"until [ -s {out}/verdict.json ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


def works_for_long(out: str) -> None:
    """Show signs of life on rank 1 for longer than the limit, and hang then."""
    group = open_watched(out)
    if group.rank == 1:
        for _ in range(4):
            time.sleep(0.5)
            group.sign("validating")
        assert not (Path(out) / "verdict.json").exists()
        group.sign("training")
        time.sleep(100)
    group.gather(group.rank)


def receives_nothing(out: str) -> None:
    """Wait on all ranks for messages that never arrive."""
    group = open_watched(out)
    with group.waiting("sum the batch"):
        time.sleep(100)


LIMIT = "for more than the --collective-timeout of 1.5 s"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hang", "line"),
    [
        pytest.param(
            works_for_long,
            f"rank 1 lets the other ranks wait {LIMIT}, while training: it hangs",
            marks=pytest.mark.program,
        ),
        (hangs_on_its_own, f"rank 0 lets the other ranks wait {LIMIT}, while saving a checkpoint: it"),
        pytest.param(
            is_stopped,
            f"rank 1 showed no sign of life {LIMIT}, last seen validating: the process is stopped",
            marks=pytest.mark.program,
        ),
        pytest.param(
            receives_nothing,
            f"no rank got further {LIMIT}, while they were waiting to sum the batch: check",
            marks=pytest.mark.program,
        ),
    ],
)
def test_a_rank_that_hangs_is_named(server: RankServer, tmp_path: Path, hang: Any, line: str) -> None:
    ended = server.run(hang, str(tmp_path), world=3)
    assert [one.code for one in ended] == [1, 1, 1]
    assert json.loads((tmp_path / "verdict.json").read_text())["line"].startswith(line)


def stop_in_a_collective() -> None:
    """Wait for a rank that never comes, with a signal that Python cannot handle meanwhile."""
    watch.STOP_S, watch.POLL_S = 0.2, 0.05
    signal.signal(signal.SIGTERM, lambda *_: None)
    group = open_group()
    if group.rank == 1:
        signal.pause()
    os.kill(os.getpid(), signal.SIGTERM)
    group.agree(False)


@pytest.mark.distributed
def test_ranks_that_wait_in_a_collective_leave_after_a_signal(server: RankServer) -> None:
    ended = server.run(stop_in_a_collective)
    assert [one.code for one in ended] == [143, 143]


def interrupted_start(stranger: bool) -> str:
    """Wait for a rank that never starts, or for a program that never answers, and get a signal."""
    if os.environ["RANK"] == "1":
        return "never joins"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1]) if stranger else os.environ["MASTER_PORT"]
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            open_ranks({**os.environ, "MASTER_PORT": port})
        except KeyboardInterrupt:
            return "interrupted"
    return "joined"


@pytest.mark.distributed
@pytest.mark.parametrize("stranger", [False, True])
def test_ctrl_c_ends_the_wait_at_the_start(server: RankServer, stranger: bool) -> None:
    assert server.values(interrupted_start, stranger) == ["interrupted", "never joins"]


def connect_to(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def test_a_store_is_waited_for_and_what_is_none_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        named = f"nobody answers at 127.0.0.1:{port}, where the ranks meet, for 0.01 s .*refused.*MASTER_ADDR"
        with pytest.raises(AutobatchError, match=named):
            reach_store(lambda: None, "127.0.0.1", port, start_s=0.01)
        threading.Timer(0.05, listener.listen).start()
        named = f"what listens at 127.0.0.1:{port} took the connection and gave no answer for 0.2 s"
        with pytest.raises(AutobatchError, match=named):
            reach_store(lambda: connect_to(port), "127.0.0.1", port, answer_s=0.2)
    store = open_store()
    store.set("key", "value")
    assert reach_store(lambda: connect_to(store.port), "127.0.0.1", store.port).get("key") == b"value"


def launch_of(rank: int, world: int = 2, restart: int = 0) -> Launch:
    return Launch(rank=rank, world=world, address="here", port=1, restart=restart)


def test_ranks_of_one_start_meet_though_their_launchers_count_restarts_differently() -> None:
    """A rank whose place another process has had waits for the next start."""
    store = HashStore()
    for number, (restarts, expected) in enumerate(
        [((0, 0), 0), ((1, 0), 1), ((1, 0), 2), ((4, 1), 4), ((0, 0), 0)], 1
    ):
        if number == 5:  # a process that trains again
            store.add("ended", 4)
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(meet, store, launch_of(1, restart=restarts[1]), 10)
            time.sleep(0.02)
            assert not early.done()
            first = meet(store, launch_of(0, restart=restarts[0]), 10)
        assert first == early.result()
        assert (first.number, first.restart, len(set(first.tokens))) == (number, expected, 2)


@pytest.mark.parametrize(
    ("others", "message"),
    [([2], "WORLD_SIZE is 3, and rank 1 did not start within 0 s"), ([], "and ranks 1, 2 did not start")],
)
def test_ranks_that_never_start_are_named(others: list[int], message: str) -> None:
    store = HashStore()
    for rank in others:
        store.set(f"start/1/rank/{rank}", "token")
    with pytest.raises(AutobatchError, match=message):
        meet(store, launch_of(0, 3), 0)
    with pytest.raises(AutobatchError, match="and rank 0 did not start"):
        meet(HashStore(), launch_of(1, 3), 0)


def test_ranks_never_share_a_gpu() -> None:
    with pytest.raises(InputError, match=r"ranks 0 and 2 share one GPU of b"):
        check_gpus([("b", "x"), ("a", "x"), ("b", "x")])
    check_gpus([("b", "x"), ("b", "y"), ("c", "x"), ("d", None), ("d", None)])
