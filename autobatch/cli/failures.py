"""What becomes of an exception on the command line: one line, an exit code, and a log with all of it."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import platform
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autobatch.core.errors import AutobatchError, UserCodeError
from autobatch.core.version import __version__
from autobatch.workload.user_code import describe, failed_part, remarks_on, user_frame

LOG = "run.log"
"""Name of the log in the folder of a run."""


_REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)


class Terminated(BaseException):
    """SIGTERM or SIGUSR1 came before there was a run that could be checkpointed, or after.

    No ``KeyboardInterrupt``, at which a search answers with the best so far: there is no time for more.
    """


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """What is said of an exception, and what the process exits with."""

    line: str
    exit_code: int
    logged: bool
    """Whether the traceback is worth a file: what went wrong is not plain from the line."""


class RunLog:
    """Where the whole story of a failure is written: the run's folder once there is one, else the data home.

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
        """The folder of the run."""

    def enter(self, folder: Path) -> None:
        """From here on the run has a folder."""
        self.folder = folder

    def write(self, error: BaseException) -> Path | None:
        """Append an exception with its traceback; ``None`` where no place can be written."""
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


def describe_failure(error: BaseException, *, folder: Path | None = None) -> ErrorReport:
    """Put an exception into one line.

    Args:
        error: what ended the command.
        folder: the folder of the run, where there is one.
    """
    if isinstance(error, KeyboardInterrupt | Terminated):
        how, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        return ErrorReport(line=f"{how}; {_kept(folder)}", exit_code=code, logged=False)
    if isinstance(error, AutobatchError):
        remarks = remarks_on(error)
        logged = isinstance(error, UserCodeError) or error.exit_code == 1
        line = "; ".join([str(error), *remarks])
        return ErrorReport(line=_one_line(line), exit_code=error.exit_code, logged=logged)
    # Every exit of our own is a return: a SystemExit is the workload's.
    theirs = failed_part(error) is not None or user_frame(error) is not None
    if theirs or isinstance(error, SystemExit):
        return ErrorReport(line=_one_line(describe(error)), exit_code=2, logged=True)
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return ErrorReport(line=_one_line(f"the system refuses: {error}"), exit_code=1, logged=True)
    line = f"unexpected {type(error).__name__}: {error}; this is a fault of autobatch, please report it"
    return ErrorReport(line=_one_line(line), exit_code=1, logged=True)


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    """Inside, what asks a process to stop unwinds like Ctrl-C, so that what was opened is closed.

    That is SIGTERM, and SIGUSR1, by which schedulers warn of the end of a job. Training has its own handlers.
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
    checkpoints = None if folder is None else folder / "checkpoints"
    if checkpoints is None or not checkpoints.is_dir():
        return "nothing was trained"
    return f"what was saved before is whole: {checkpoints}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
