"""The deadline of a signal that asks to stop: the main thread may wait in a collective, and never see it.

Python runs a handler in the main thread, and not while that waits for other ranks. The interpreter also
writes the number of each signal to a pipe, at once. The thread of the bell reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from autobatch.core.signals import STOPPING

STOP_S = 20.0
"""Seconds from a signal until a rank that got no further leaves: torchrun kills it after 30."""


class SignalDeadline:
    """The signals that this process got, as another thread sees them.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reader: int | None = None
        self._first: tuple[int, float, int] | None = None
        self._lock = threading.Lock()
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:  # another library listens
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)
            return
        self._reader, self._writer = reader, writer

    def passed(self, progress: int) -> int | None:
        """Return the signal whose deadline has passed without any progress; None if there is none.

        Args:
            progress: a number that grows with every message among the ranks.
        """
        self._read(progress)
        if self._first is None:
            return None
        number, since, then = self._first
        return number if progress == then and self._clock() - since > STOP_S else None

    def _read(self, progress: int) -> None:
        """Read the signals since the last look, from any thread."""
        with self._lock:
            if self._reader is None:
                return
            numbers = b""
            with suppress(BlockingIOError):
                numbers = os.read(self._reader, 64)
            asked = next((number for number in numbers if number in STOPPING), None)
            if asked is not None and self._first is None:
                self._first = (asked, self._clock(), progress)

    def close(self) -> None:
        """Stop listening; the thread that calls `passed` has ended."""
        with self._lock:
            if self._reader is not None:
                signal.set_wakeup_fd(-1)
                os.close(self._reader)
                os.close(self._writer)
                self._reader = None
