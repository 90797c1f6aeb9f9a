"""Output of the command line: streams that survive their reader, and failures as one line and a log."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from autobatch.core.errors import AutobatchError, DoesNotFitError, UserCodeError
from autobatch.core.text import error_text, one_line
from autobatch.core.version import __version__

LOG = "run.log"
"""Name of the log in the folder of a run."""
_REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)


class SafeStream:
    """Stream that drops all text after a write has failed, so that training continues.

    Args:
        stream: the stream to write to; its other attributes are passed on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        """First failure of the stream; None if all was written."""

    def write(self, text: str) -> int:
        """Write the text, or drop it after a failure."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or do nothing after a failure."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self.failure is None:
            try:
                act()
            except OSError as error:
                self.failure = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
    copy = os.dup(number)
    os.dup2(sys.stderr.fileno(), number)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(copy, number)
        os.close(copy)


def print_error(line: str) -> None:
    """Print one line, red on a terminal with colours."""
    text = f"autobatch: {one_line(line)}"
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


def write_line(text: str) -> int:
    """Write to standard output, and return the exit code."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        return undelivered_code(error)
    return 0


def write_json(content: object) -> int:
    """Write an object as JSON to standard output, and return the exit code."""
    # Only here: the help does not need them.
    import json

    import msgspec

    # In ASCII: foreign text must not control the terminal.
    return write_line(json.dumps(json.loads(msgspec.json.encode(content))))


class Terminated(BaseException):
    """SIGTERM or SIGUSR1 outside of training.

    Not a ``KeyboardInterrupt``, after which a search still returns its best size: there is no time for that.
    """


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGUSR1 within the block, so that resources are closed.

    Schedulers send SIGUSR1 before the end of a job. Training has its own handlers.
    """
    import signal
    import threading

    from autobatch.core.signals import handle_signals

    def terminate(*_: object) -> None:
        raise Terminated

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    is_main = threading.current_thread() is threading.main_thread()
    with handle_signals(numbers if is_main else [], terminate):
        yield


class ErrorReport(NamedTuple):
    """Message and exit code of an exception."""

    line: str
    """One line that is safe to print, whatever the user's code wrote into it."""
    exit_code: int
    is_logged: bool = True
    """True if the traceback is written to the log, because the line alone does not explain the failure."""


def describe_failure(
    error: BaseException, *, folder: Path | None = None, measures: bool = True
) -> ErrorReport:
    """Describe an exception in one line, with its exit code.

    Args:
        error: the exception that ended the command.
        folder: the folder of the run; None if unknown.
        measures: whether the command saves limits and trials on the way.
    """
    report = _describe(error, _left_behind(folder) if measures else "")
    return report._replace(line=one_line(report.line))


def _describe(error: BaseException, left_behind: str) -> ErrorReport:
    from autobatch.workload.user_code import describe, failed_part, remarks_on, user_frame

    if isinstance(error, KeyboardInterrupt | Terminated):
        how, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        return ErrorReport(how + left_behind, code, is_logged=False)
    if isinstance(error, AutobatchError):
        line = "; ".join([str(error), *remarks_on(error)])
        return ErrorReport(line, error.exit_code, isinstance(error, UserCodeError) or error.exit_code == 1)
    if _is_oom(error):
        text = f"{type(error).__name__}: {error_text(error)}".splitlines()[0]
        where = "; ".join([text, *remarks_on(error)])
        line = f"out of memory where nothing smaller can be tried: {where}; free memory"
        return ErrorReport(line, DoesNotFitError.exit_code)
    # autobatch never raises SystemExit here, so it comes from the workload.
    if failed_part(error) is not None or user_frame(error) is not None or isinstance(error, SystemExit):
        return ErrorReport(describe(error), 2)
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        file = error.filename or "operating system error"
        return ErrorReport(f"{file}: {error.strerror or error}", 1)
    found = f"unexpected {type(error).__name__}: {error_text(error)}"
    return ErrorReport(f"{found}; this is a bug in autobatch, please report it", 1)


def _is_oom(error: BaseException) -> bool:
    """Check whether memory ran out, without importing torch only for that."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from autobatch.device.oom import is_oom

    return is_oom(error)


def _left_behind(folder: Path | None) -> str:
    """Return what an interruption left behind, to be appended to its name."""
    if folder is None or not (folder / "checkpoints").is_dir():
        return (
            " before the first checkpoint; limits and trials so far are saved, and the same command uses them"
        )
    return f"; earlier checkpoints are intact: {folder / 'checkpoints'}"


class RunLog:
    """Log of failures, in the folder of the run if it is known, else in the data directory.

    Args:
        command: the command line.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.folder: Path | None = None
        """Folder of the run; None if unknown."""

    def enter(self, folder: Path) -> None:
        """Set the folder of the run."""
        self.folder = folder

    def write(self, error: BaseException) -> Path | None:
        """Append an exception with its traceback. Return the file, or None if none can be written."""
        import datetime
        import platform
        import traceback

        from autobatch.device.profiles import data_home

        now = datetime.datetime.now(tz=datetime.UTC)
        text = (
            f"{now.isoformat(timespec='seconds')}  {self.command}\nautobatch {__version__}, "
            f"python {platform.python_version()}, in {Path.cwd()}\n"
            f"{''.join(traceback.format_exception(error))}\n"
        )
        own = [] if self.folder is None else [self.folder / LOG]
        for path in (*own, data_home(os.environ) / "logs" / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}.log"):
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
                return path
        return None
