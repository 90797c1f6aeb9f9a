"""The wait of a rank for the others: who is missing is named, and a signal ends it."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading

import pytest
from torch.distributed import TCPStore

from autobatch.distributed.assembly import connect_in_time, wait_for_ranks, wait_for_store
from autobatch.distributed.messages import RankLost
from autobatch.distributed.ranks import open_ranks
from autobatch.distributed.start import open_store
from tests.distributed.test_bell import Store
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group


def test_a_place_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        wait_for_store("127.0.0.1", port)
    message = f"nobody answers at 127.0.0.1:{port}, where the ranks meet, for 0.01 s .*refused.*MASTER_ADDR"
    with pytest.raises(RankLost, match=message):
        wait_for_store("127.0.0.1", port, 0.01)


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(RankLost, match=r"nobody answers at other:1, .* for 0 s .*Name or service not known"):
        wait_for_store("other", 1, 0)


def test_a_store_that_starts_later_is_waited_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Timer(0.05, listener.listen).start()
        wait_for_store("127.0.0.1", listener.getsockname()[1])


def connect_to(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def test_a_program_that_takes_connections_and_never_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        wait_for_store("127.0.0.1", port)
        message = f"what listens at here:{port} took the connection and gave no answer for 0.2 s.*MASTER_PORT"
        with pytest.raises(RankLost, match=message):
            connect_in_time(lambda: connect_to(port), "here", port, 0.2)


def test_a_store_that_answers_is_returned_and_its_error_is_raised() -> None:
    kept = open_store()
    kept.set("key", "value")
    assert connect_in_time(lambda: connect_to(kept.port), "here", kept.port).get("key") == b"value"

    def fail() -> TCPStore:
        raise TimeoutError("of torch")

    with pytest.raises(TimeoutError, match="of torch"):
        connect_in_time(fail, "here", 1)


@pytest.mark.parametrize(
    ("there", "message"),
    [([0, 2], "WORLD_SIZE is 3, and rank 1 did not start within 0 s"), ([0], "and ranks 1, 2 did not start")],
)
def test_ranks_that_never_start_are_named(there: list[int], message: str) -> None:
    store = Store()
    for rank in there[1:]:
        store.set(f"first/{rank}", "")
    with pytest.raises(RankLost, match=re.escape(message)):
        wait_for_ranks(store, "first", 0, 3, 0)
    with pytest.raises(RankLost, match="ranks 1, 2 did"):
        wait_for_ranks(store, "second", 0, 3, 0)


def wait_alone() -> str:
    if os.environ["RANK"] == "1":
        return "never joins"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        open_group()
    except KeyboardInterrupt:
        return "interrupted"
    return "joined"


def wait_for_a_stranger() -> str:
    if os.environ["RANK"] == "1":
        return "never joins"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            open_ranks({**os.environ, "MASTER_PORT": str(listener.getsockname()[1])})
        except KeyboardInterrupt:
            return "interrupted"
    return "joined"


@pytest.mark.distributed
def test_a_signal_ends_the_wait_for_a_program_that_never_answers(server: RankServer) -> None:
    assert server.values(wait_for_a_stranger) == ["interrupted", "never joins"]


@pytest.mark.distributed
def test_ctrl_c_ends_the_wait(server: RankServer) -> None:
    assert server.values(wait_alone) == ["interrupted", "never joins"]
