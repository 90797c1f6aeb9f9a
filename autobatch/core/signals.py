"""Signals that ask a run to stop: noted at once, obeyed at the end of the window."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


ECHO_SECONDS = 0.1
"""The same signal again within this time is the same request: a terminal or ``timeout`` tells the whole group
of processes, and whatever started this one passes it on besides."""


class StopRequest:
    """Which signal asked the run to stop; ``None``: none did."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.since = 0.0
        """When that was, in seconds of the clock."""

    @property
    def counts_as(self) -> int:
        """The signal for the exit code: Ctrl-C is SIGINT, and whatever else asks is SIGTERM."""
        return signal.SIGINT if self.signal_number == signal.SIGINT else signal.SIGTERM


@contextmanager
def stop_on_signals(clock: Callable[[], float] = time.monotonic) -> Iterator[StopRequest]:
    """Inside, the first signal is only noted; another one ends the process at once, as without autobatch.

    Off the main thread, where Python allows no handlers, nothing is caught.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        if request.signal_number is None:
            request.signal_number, request.since = number, clock()
        elif number != request.signal_number or clock() - request.since > ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, note) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            # None: installed by something that is not Python, and not ours to bring back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
