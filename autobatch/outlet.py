"""A stream that outlives its reader: a training run must not die because nobody reads its output any more."""

from __future__ import annotations

from typing import TextIO


class Outlet:
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
