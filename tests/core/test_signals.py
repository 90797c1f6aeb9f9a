"""Stop signals: the first is recorded and answered, a second one ends the process."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from autobatch.core import signals
from autobatch.core.signals import hold_back_signals, stop_on_signals


def ending_of(body: Callable[[], None]) -> tuple[int, bytes, str]:
    """Run a function in a fork; return its wait status, what it wrote to descriptor 1, and to 2."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(to_out, 1)
        os.dup2(to_err, 2)
        # A shell lets what it starts in the background ignore SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            body()
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(to_out)
    os.close(to_err)
    with os.fdopen(out, "rb") as written, os.fdopen(err) as said:
        return status, written.read(), said.read()


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def busy(*waits_s: float, then_s: float = 0.0) -> None:
    """Get SIGINT after each wait while native code waits for a lock; it does not return for a signal."""
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # a mutex of zeros is free
    library.pthread_mutex_lock(lock)

    def press() -> None:
        for wait_s in waits_s:
            time.sleep(wait_s)
            kill(signal.SIGINT)
        time.sleep(then_s)
        library.pthread_mutex_unlock(lock)

    threading.Thread(target=press, daemon=True).start()
    library.pthread_mutex_lock(lock)


@pytest.mark.parametrize(("number", "second"), [(signal.SIGINT, 0.05), (signal.SIGTERM, 1.0)])
def test_the_same_signal_within_a_moment_is_the_same_request(number: int, second: float) -> None:
    def body() -> None:
        with stop_on_signals(clock=iter((0.0, second, 4.5 * second, 10 * second)).__next__):
            for _ in range(4):
                kill(number)
                os.write(1, b"x")

    ended, written, _ = ending_of(body)
    assert (ended, written) == (-number, b"xxx"), "the fourth comes later and is another request"


@pytest.mark.parametrize(("number", "second"), [(2, signal.SIGTERM), (signal.SIGUSR1, signal.SIGINT)])
def test_the_first_signal_is_recorded_and_another_one_does_what_it_does_outside(
    number: int, second: int
) -> None:
    before = [signal.getsignal(one) for one in signals.STOPPING]
    with stop_on_signals() as request:
        assert request.signal_number is None
        kill(number)
        assert request.signal_number == number
    assert [signal.getsignal(one) for one in signals.STOPPING] == before

    def body() -> None:
        with stop_on_signals():
            kill(number)
            kill(second)

    assert ending_of(body)[0] == -second


def test_a_signal_within_the_block_comes_when_the_block_ends() -> None:
    def body() -> None:
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"signal "))
        with hold_back_signals([signal.SIGUSR1], with_tracker=False):
            signal.raise_signal(signal.SIGUSR1)
            os.write(1, b"block ")
        os.write(1, b"end")

    assert ending_of(body)[:2] == (0, b"block signal end")


TOLD = f"autobatch: {signals.STOPS}\n"


@pytest.mark.parametrize(
    ("waits_s", "then_s", "found"),
    [
        ((0.1, 0.0), 0.3, (0, b"told", TOLD)),
        ((0.1, 0.5), 0.0, (-signal.SIGINT, b"", TOLD)),
        (
            (0.1, 0.5),
            60.0,
            (130, b"", TOLD + "autobatch: ended within a step; complete checkpoints are intact\n"),
        ),
    ],
    ids=["twice in a moment", "again", "again, and native code runs on"],
)
def test_signals_are_answered_while_native_code_runs(
    waits_s: tuple[float, ...], then_s: float, found: tuple[int, bytes, str]
) -> None:
    def body() -> None:
        signals.NATIVE_S = 0.2
        with stop_on_signals() as request:
            busy(*waits_s, then_s=then_s)
            os.write(1, b"told" if request.signal_number == signal.SIGINT else b"none")

    assert ending_of(body) == found
