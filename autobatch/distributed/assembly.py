"""The start of the ranks, as each of them waits for the others.

torch waits for them outside of Python, where no Ctrl-C ends it and nobody is named. So each rank first waits
here, until the store answers and all ranks have said that they are there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from autobatch.distributed.bell import Store
from autobatch.distributed.messages import RankLost

ASSEMBLY_S = 300.0
"""Seconds in which all ranks must have started."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.25
CONNECT_S = 5.0
"""Longest try to connect."""
ANSWER_S = 60.0
"""Seconds in which a store answers that has taken a connection."""

T = TypeVar("T")


def wait_for_store(address: str, port: int, seconds: float = ASSEMBLY_S) -> None:
    """Wait until something listens where the store of the run is kept.

    Raises:
        RankLost: nothing does.
    """
    reason = ""

    def answers() -> bool:
        nonlocal reason
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
        except OSError as error:
            reason = error.strerror or str(error)
            return False
        return True

    if not _becomes_true(answers, seconds):
        raise RankLost(
            f"nobody answers at {address}:{port}, where the ranks meet, for {seconds:g} s ({reason}): check "
            "MASTER_ADDR, MASTER_PORT, the firewall, and that rank 0 runs"
        )


def connect_in_time(connect: Callable[[], T], address: str, port: int, seconds: float = ANSWER_S) -> T:
    """Connect to the store of the run, and return it.

    torch waits for its first answer without a limit, and no signal ends that. So it waits in a thread, which
    lasts as long as this process if no answer comes.

    Args:
        connect: connects.
        address: address of the store, for the error.
        port: its port, for the error.
        seconds: longest wait.

    Raises:
        RankLost: whatever listens there does not answer.
    """
    answer: Future[T] = Future()

    def fetch() -> None:
        try:
            answer.set_result(connect())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=fetch, name="connect", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise
        raise RankLost(
            f"what listens at {address}:{port} took the connection and gave no answer for {seconds:g} s, so "
            "it is no store of torch: another program uses MASTER_PORT; give all ranks another"
        ) from None


def wait_for_ranks(store: Store, name: str, rank: int, world: int, seconds: float = ASSEMBLY_S) -> None:
    """Wait until all ranks have called this.

    Args:
        store: the store of the run.
        name: differs from one assembly to the next.
        rank: this rank.
        world: number of ranks.
        seconds: longest wait.

    Raises:
        RankLost: some rank did not; it is named.
    """
    keys = [f"{name}/{one}" for one in range(world)]
    store.set(keys[rank], "")
    if _becomes_true(lambda: store.check(keys), seconds):
        return
    missing = [str(one) for one, key in enumerate(keys) if not store.check([key])]
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
    raise RankLost(
        f"WORLD_SIZE is {world}, and {who} did not start within {seconds:g} s: start all ranks, and look at "
        "their own logs"
    )


def _becomes_true(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_S, 1.5 * pause)
    return True
