"""Stop signals: the first is recorded, a second one ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from autobatch.core.signals import hold_back_signals, stop_on_signals

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def ending_of(body: Callable[[], None]) -> int:
    """Run a function in a fork, and return the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("number", "second"), [(signal.SIGINT, 0.02), (signal.SIGTERM, 1.0)])
def test_the_same_signal_within_a_moment_is_the_same_request(number: int, second: float) -> None:
    read, write = os.pipe()

    def body() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with stop_on_signals(clock=iter((0.0, second, 4.5 * second, 10 * second)).__next__):
            for _ in range(4):
                os.kill(os.getpid(), number)
                os.write(write, b"x")

    assert ending_of(body) == number
    assert os.read(read, 10) == b"xxx", "the fourth comes later and is another request"


def test_a_second_signal_does_at_once_what_it_does_outside_of_training() -> None:
    def body() -> None:
        # A shell lets what it starts in the background ignore SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.signal_number == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)

    assert ending_of(body) == signal.SIGINT


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_recorded_and_the_handlers_come_back(number: int) -> None:
    before = [signal.getsignal(one) for one in STOPPING]
    with stop_on_signals(clock=lambda: 7.5) as request:
        assert request.signal_number is None
        signal.raise_signal(number)
    assert (request.signal_number, request.since) == (number, 7.5)
    assert request.counts_as == (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    assert [signal.getsignal(one) for one in STOPPING] == before


def test_another_thread_catches_nothing() -> None:
    before = [signal.getsignal(one) for one in STOPPING]
    seen = []

    def body() -> None:
        with stop_on_signals() as request:
            seen.append((request.signal_number, [signal.getsignal(one) for one in STOPPING]))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


@pytest.mark.parametrize("with_tracker", [False, True])
def test_a_signal_within_the_block_comes_when_the_block_ends(with_tracker: bool) -> None:
    read, write = os.pipe()

    def body() -> None:
        signal.signal(signal.SIGUSR1, lambda *_: os.write(write, b"signal "))
        with hold_back_signals([signal.SIGUSR1], with_tracker=with_tracker):
            signal.raise_signal(signal.SIGUSR1)
            os.write(write, b"block ")
        os.write(write, b"end")

    assert ending_of(body) == 0
    assert os.read(read, 100) == b"block signal end"
