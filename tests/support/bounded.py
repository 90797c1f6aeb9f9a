"""A bound on the time of a test that may hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer than some seconds."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"the block took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
