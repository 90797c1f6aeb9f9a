"""Standard output, kept for what it is for, and outlived by a training run that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class SafeStream:
    """Passes on what is written until that fails; what comes after is dropped.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        """Why nothing is passed on any more."""

    def write(self, text: str) -> int:
        """Write, or drop."""
        if self.failure is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self.failure = error
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        if self.failure is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.failure = error

    def isatty(self) -> bool:
        """Whether a person reads along."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's own descriptor."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """The stream's own encoding."""
        return self._stream.encoding


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """Inside, what anything prints goes to standard error: standard output is for one JSON object alone."""
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # captured: it has no descriptor
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(number)
    os.dup2(sys.stderr.fileno(), number)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
