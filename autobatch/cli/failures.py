"""Reports of failures: one line, an exit code, and a log with the traceback."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autobatch.core.errors import AutobatchError, DoesNotFitError, UserCodeError
from autobatch.core.text import error_text, one_line
from autobatch.core.version import __version__
from autobatch.workload.user_code import describe, failed_part, remarks_on, user_frame

LOG = "run.log"
"""Name of the log in the folder of a run."""
_REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)


class Terminated(BaseException):
    """SIGTERM or SIGUSR1 outside of training.

    Not a ``KeyboardInterrupt``, after which a search still returns its best size: there is no time for that.
    """


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Message and exit code of an exception."""

    line: str
    exit_code: int
    logged: bool
    """True if the traceback is written to the log, because the line alone does not explain the failure."""

    def __post_init__(self) -> None:
        """Make the message one line that is safe to print, whatever the user's code wrote into it."""
        object.__setattr__(self, "line", one_line(self.line))


class RunLog:
    """Log of failures, in the folder of the run if it is known, else in the data directory.

    Args:
        home: finds the data directory.
        command: the command line.
    """

    def __init__(self, home: Callable[[], Path], command: str) -> None:
        self.command = command
        self._home = home
        stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
        self._name = f"{stamp}-{os.getpid()}.log"
        self.folder: Path | None = None
        """Folder of the run; None if unknown."""

    def enter(self, folder: Path) -> None:
        """Set the folder of the run."""
        self.folder = folder

    def write(self, error: BaseException) -> Path | None:
        """Append an exception with its traceback. Return the file, or None if none can be written."""
        now = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
        text = (
            f"{now}  {self.command}\nautobatch {__version__}, python {platform.python_version()}, "
            f"in {Path.cwd()}\n{''.join(traceback.format_exception(error))}\n"
        )
        own = [] if self.folder is None else [self.folder / LOG]
        for path in (*own, self._home() / "logs" / self._name):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
            except OSError:
                _discard_if_empty(path)
                continue
            return path
        return None


def describe_failure(
    error: BaseException, *, folder: Path | None = None, measures: bool = True
) -> ErrorReport:
    """Describe an exception in one line, with its exit code.

    Args:
        error: the exception that ended the command.
        folder: the folder of the run; None if unknown.
        measures: whether the command saves limits and trials on the way.
    """
    if isinstance(error, KeyboardInterrupt | Terminated):
        how, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        kept = _kept(folder) if measures else ""
        return ErrorReport(line=how + kept, exit_code=code, logged=False)
    if isinstance(error, AutobatchError):
        remarks = remarks_on(error)
        logged = isinstance(error, UserCodeError) or error.exit_code == 1
        line = "; ".join([str(error), *remarks])
        return ErrorReport(line=line, exit_code=error.exit_code, logged=logged)
    # autobatch never raises SystemExit here, so it comes from the workload.
    if _is_oom(error):
        return ErrorReport(line=_no_memory(error), exit_code=DoesNotFitError.exit_code, logged=True)
    theirs = failed_part(error) is not None or user_frame(error) is not None
    if theirs or isinstance(error, SystemExit):
        return ErrorReport(line=describe(error), exit_code=2, logged=True)
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        file = error.filename or "operating system error"
        return ErrorReport(line=f"{file}: {error.strerror or error}", exit_code=1, logged=True)
    found = f"unexpected {type(error).__name__}: {error_text(error)}"
    line = f"{found}; this is a bug in autobatch, please report it"
    return ErrorReport(line=line, exit_code=1, logged=True)


def _is_oom(error: BaseException) -> bool:
    """Check whether memory ran out, without importing torch only for that."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from autobatch.device.oom import is_oom

    return is_oom(error)


def _no_memory(error: BaseException) -> str:
    remarks = "".join(f"; {remark}" for remark in remarks_on(error))
    text = f"{type(error).__name__}: {error_text(error)}".splitlines()[0]
    return f"out of memory where nothing smaller can be tried: {text}{remarks}; free memory"


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGUSR1 within the block, so that resources are closed.

    Schedulers send SIGUSR1 before the end of a job. Training has its own handlers.
    """

    def terminate(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _discard_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if not path.stat().st_size:
            path.unlink()


def _kept(folder: Path | None) -> str:
    """Return what an interruption left behind, to be appended to its name."""
    checkpoints = None if folder is None else folder / "checkpoints"
    if checkpoints is None or not checkpoints.is_dir():
        return (
            " before training; limits and trials so far are saved, and the same command continues with them"
        )
    return f"; earlier checkpoints are intact: {checkpoints}"
