"""The deadline of a signal, as a thread sees it while the main thread waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from autobatch.distributed import bell, deadline
from autobatch.distributed.deadline import STOP_S, SignalDeadline
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.signalled import preserved_handlers


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Iterator[SignalDeadline]:
    with preserved_handlers():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        found = SignalDeadline(clock)
        yield found
        found.close()
        assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_counts_from_its_first_arrival(watch: SignalDeadline, clock: Clock) -> None:
    assert watch.passed(3) is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.passed(3) is None
    clock.now = STOP_S
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.passed(3) is None
    clock.now = STOP_S + 0.1
    assert watch.passed(3) == signal.SIGUSR1


def test_any_progress_after_the_signal_ends_the_watch(watch: SignalDeadline, clock: Clock) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.passed(3) is None
    clock.now = STOP_S + 9.0
    assert watch.passed(4) is None


def test_other_signals_are_not_requests(watch: SignalDeadline, clock: Clock) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    assert watch.passed(0) is None
    clock.now = STOP_S + 9.0
    assert watch.passed(0) is None


def test_another_library_keeps_its_pipe(clock: Clock) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        assert SignalDeadline(clock).passed(0) is None
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def stop_in_a_collective() -> None:
    """Wait for a rank that never comes, with a signal that Python cannot handle meanwhile."""
    deadline.STOP_S, bell.POLL_S = 0.2, 0.05
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
