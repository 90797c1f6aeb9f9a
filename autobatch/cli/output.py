"""Standard output, reserved for JSON if asked and safe to write after the reader left; and error lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from autobatch.core.text import encodable, one_line


class SafeStream:
    """Stream that drops all text after a write has failed, so that training continues.

    Args:
        stream: the stream to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        """First failure of the stream; None if all was written."""

    def write(self, text: str) -> int:
        """Write the text, or drop it after a failure."""
        if self.failure is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self.failure = error
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or do nothing after a failure."""
        if self.failure is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.failure = error

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """Encoding of the stream."""
        return self._stream.encoding


@contextlib.contextmanager
def reserve_stdout() -> Iterator[None]:
    """Redirect standard output to standard error within the block, also for C code and child processes."""
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # captured output has no descriptor
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


def print_error(line: str) -> None:
    """Print one line, red on a terminal with colours."""
    text = encodable(f"autobatch: {one_line(line)}", sys.stderr.encoding)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, highlight=False).print(Text(text, style="red"), soft_wrap=True)
        return
    sys.stderr.write(text + "\n")


def undelivered_code(error: OSError) -> int:
    """Return the exit code after output could not be written: 0 if the reader closed the pipe."""
    with contextlib.suppress(OSError, ValueError):  # captured output has no descriptor
        # Python must not try to write the rest of the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    print_error(f"cannot write to standard output: {error.strerror or error}")
    return 1
