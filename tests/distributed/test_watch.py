"""What a rank learns of the others: the first failure, and a signal that leads to no progress."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from autobatch.distributed.watch import STOP_S, SignalDeadline


@pytest.fixture
def deadline() -> Iterator[SignalDeadline]:
    """Return a deadline that reads its time from ``now``."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    found = SignalDeadline(lambda: found.now)  # type: ignore[attr-defined]
    found.now = 0.0  # type: ignore[attr-defined]
    yield found
    found.arrivals.close()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_request_to_stop_counts_from_its_first_arrival(deadline: Any) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    assert deadline.expired(3) is None
    deadline.now = 1.0
    os.kill(os.getpid(), signal.SIGUSR1)
    assert deadline.expired(3) is None
    deadline.now = STOP_S + 1.0
    os.kill(os.getpid(), signal.SIGTERM)
    assert deadline.expired(3) is None, "SIGHUP is no request"
    deadline.now = STOP_S + 1.1
    assert deadline.expired(3) == signal.SIGUSR1
    assert deadline.expired(4) is None, "a wait has ended since"


def test_another_library_and_another_thread_keep_the_pipe() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        thread = threading.Thread(target=SignalDeadline)
        thread.start()
        thread.join()
        assert SignalDeadline().expired(0) is None
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
