"""Signal handlers of the test process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


@contextmanager
def preserved_handlers() -> Iterator[None]:
    """Restore the handlers of signals that ask to stop after the block."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in NAMES)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
