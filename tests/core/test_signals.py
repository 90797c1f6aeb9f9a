"""Stop signals: the first is recorded, a second one ends the process."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
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


@pytest.mark.parametrize(("number", "second"), [(signal.SIGINT, 0.05), (signal.SIGTERM, 1.0)])
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


@pytest.mark.parametrize(("pause_s", "is_again"), [(0.5, True), (0.0, False)])
def test_a_second_signal_counts_although_native_code_ran_during_both(pause_s: float, is_again: bool) -> None:
    """Native code that waits for a lock does not return for a signal."""
    read, write = os.pipe()

    def body() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # a mutex of zeros is free
        library.pthread_mutex_lock(lock)

        def press() -> None:
            for wait_s in (0.2, pause_s):
                time.sleep(wait_s)
                os.kill(os.getpid(), signal.SIGINT)
            library.pthread_mutex_unlock(lock)

        with stop_on_signals() as request:
            threading.Thread(target=press).start()
            library.pthread_mutex_lock(lock)
            os.write(write, b"step " if request.signal_number == signal.SIGINT else b"none ")

    ended = ending_of(body)
    os.close(write)
    assert (ended, os.read(read, 10)) == ((signal.SIGINT, b"") if is_again else (0, b"step "))


def test_the_socket_of_another_library_is_left_to_it() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with stop_on_signals():
            assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
