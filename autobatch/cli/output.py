"""Output of the command line: streams that survive their reader, and failures as one line and a log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

from autobatch.core import __version__
from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError, UserCodeError
from autobatch.core.text import error_text, one_line

if TYPE_CHECKING:  # the help does not need it
    from pathlib import Path

PARTS: dict[str, tuple[str, ...]] = {
    "probe": ("device", "probe", "profile"),
    "plan": ("device", "probe", "plan", "profile", "report"),
    "tune": ("device", "probe", "plan", "tuning", "profile", "report"),
}
"""Parts of the JSON of a command; other commands print all of them."""
ENDING = ("SIGTERM", "SIGUSR1")
"""Signals that end a command. Schedulers send SIGUSR1 before the end of a job."""


class SafeStream:
    """Stream that drops what cannot be written, so that training continues.

    Args:
        stream: the stream to write to; its other attributes are passed on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        """Failure of the stream; None if all was written, or if its reader has gone."""

    def write(self, text: str) -> int:
        """Write the text at once."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            pass
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, "standard output")
        return len(text)

    def flush(self) -> None:
        """Do nothing: all that was written has been flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output_of_run(*, as_json: bool) -> Iterator[TextIO]:
    """Yield the stream for what people read.

    If standard output is for one JSON object, all else goes to standard error within the block, also what C
    code and child processes write.

    Raises:
        OSError: after the block, if standard output lacks a part of what was written.
    """
    if not as_json:
        stream = SafeStream(sys.stdout)
        yield cast("TextIO", stream)
        if stream.failure is not None:
            raise stream.failure
        return
    sys.stdout.flush()
    with contextlib.ExitStack() as restored:
        with contextlib.suppress(OSError, ValueError):  # captured output has no descriptor
            number = sys.stdout.fileno()
            copy = os.dup(number)
            restored.callback(os.close, copy)
            restored.callback(os.dup2, copy, number)
            os.dup2(sys.stderr.fileno(), number)
        restored.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield cast("TextIO", SafeStream(sys.stderr))


def print_error(line: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"autobatch: {one_line(line)}\n")


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if standard output is none."""
    # Only here: the help does not need it.
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_line(text: str) -> int:
    """Write to standard output, and return 0, the exit code of a command that is done then."""
    with output_of_run(as_json=False) as stream:
        stream.write(f"{text}\n")
    return 0


def write_json(content: object) -> int:
    """Write an object as JSON to standard output; see `write_line`."""
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
    """Raise `Terminated` on `ENDING` within the block, so that resources are closed.

    Training has its own handlers.
    """
    import signal

    from autobatch.core.signals import handle_signals

    def terminate(*_: object) -> None:
        raise Terminated

    with handle_signals((getattr(signal, name) for name in ENDING if hasattr(signal, name)), terminate):
        yield


class ErrorReport(NamedTuple):
    """Message and exit code of an exception."""

    line: str
    """One line that is safe to print, whatever the user's code wrote into it."""
    exit_code: int
    is_logged: bool
    """True if the traceback is written to the log, because the line alone does not explain the failure."""


def describe_failure(error: BaseException) -> ErrorReport:
    """Describe an exception in one line, with its exit code."""
    from autobatch.workload.user_code import describe, failed_part, remarks_on, user_frame

    code, is_logged, remarks = 1, True, remarks_on(error)
    if isinstance(error, KeyboardInterrupt | Terminated):
        how, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        line = f"{how}; what was measured and saved so far stays, and the same command uses it"
        is_logged = False
    elif isinstance(error, AutobatchError):
        line, code = "; ".join([str(error), *remarks]), error.exit_code
        is_logged = isinstance(error, UserCodeError) or code == 1
    elif _is_oom(error):
        text = f"{type(error).__name__}: {error_text(error)}".splitlines()[0]
        line = f"out of memory where nothing smaller can be tried: {'; '.join([text, *remarks])}; free memory"
        code = DoesNotFitError.exit_code
    # autobatch never raises SystemExit here, so it comes from the workload.
    elif failed_part(error) is not None or user_frame(error) is not None or isinstance(error, SystemExit):
        line, code = describe(error), InputError.exit_code
    elif isinstance(error, OSError) and error.strerror:
        line = f"{error.filename or 'operating system error'}: {error.strerror}"
    else:
        found = f"unexpected {type(error).__name__}: {error_text(error)}"
        line = f"{found}; this is a bug in autobatch, please report it"
    return ErrorReport(one_line(line), code, is_logged)


def _is_oom(error: BaseException) -> bool:
    """Check whether memory ran out, without importing torch only for that."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from autobatch.device.oom import is_oom

    return is_oom(error)


def new_log(kind: str = "") -> Path:
    """Return the path of a new log in the data directory, which may not exist yet."""
    import datetime

    from autobatch.device.profiles import data_home

    now = datetime.datetime.now(tz=datetime.UTC)
    return data_home(os.environ) / "logs" / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}{kind}.log"


def write_log(error: BaseException, command: str, folder: Path | None) -> Path | None:
    """Append an exception with its traceback to the log. Return the file, or None if none can be written.

    Args:
        error: the exception.
        command: the command line.
        folder: the folder of the run; None if it has none, for a file in the data directory.
    """
    import platform
    import time
    import traceback

    text = (
        f"{time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime())}  {command}\nautobatch {__version__}, "
        f"python {platform.python_version()}, in {os.getcwd()}\n"
        f"{''.join(traceback.format_exception(error))}\n"
    )
    for path in (*([] if folder is None else [folder / "run.log"]), new_log()):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return path
    return None
