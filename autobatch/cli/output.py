"""Output of the command line: streams that survive their reader, and failures as one line and a log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from autobatch.core import __version__
from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError, UserCodeError
from autobatch.core.text import error_text, one_line, printable_lines

if TYPE_CHECKING:  # the help does not need it
    from pathlib import Path

    from autobatch.distributed.ranks import Ranks

PARTS: dict[str, tuple[str, ...]] = {
    "probe": ("device", "probe", "profile"),
    "plan": ("device", "probe", "plan", "profile", "report"),
    "tune": ("device", "probe", "plan", "tuning", "profile", "report"),
}
"""Parts of the JSON of a command; other commands print all of them."""


class SafeStream:
    """Output that drops all from the first text on that cannot be written, so that training continues.

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
        except OSError as error:
            self.failure = None if isinstance(error, BrokenPipeError) else error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return len(text)

    def flush(self) -> None:
        """Do nothing: all that was written has been flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output_of_run(*, as_json: bool) -> Iterator[None]:
    """Keep standard output for one JSON object, if that was asked for.

    All else goes to standard error within the block, also what C code and child processes write.
    """
    with contextlib.ExitStack() as restored:
        if as_json:
            with contextlib.suppress(OSError, ValueError):  # captured output has no descriptor
                number = sys.stdout.fileno()
                copy = os.dup(number)
                restored.callback(os.close, copy)
                restored.callback(os.dup2, copy, number)
                os.dup2(sys.stderr.fileno(), number)
            restored.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


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
    sys.stdout.write(f"{text}\n")
    return 0


def write_json(content: object) -> int:
    """Write an object as JSON to standard output; see `write_line`."""
    # Only here: the help does not need them.
    import json

    import msgspec

    # In ASCII: foreign text must not control the terminal.
    return write_line(json.dumps(json.loads(msgspec.json.encode(content))))


class Terminated(BaseException):
    """SIGTERM, SIGUSR1 or SIGHUP outside of training.

    Not a ``KeyboardInterrupt``, after which a search still returns its best size: there is no time for that.
    """


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise `Terminated` on signals that end a process within the block, so that resources are closed.

    Training has its own handlers.
    """
    from autobatch.core.signals import ENDING, handle_signals

    def terminate(*_: object) -> None:
        raise Terminated

    with handle_signals(ENDING, terminate):
        yield


def describe_failure(error: BaseException) -> tuple[str, int, bool]:
    """Describe an exception in one line that is safe to print, whatever the user's code wrote into it.

    Returns:
        The line, the exit code, and True if the traceback is logged, because the line does not explain all.
    """
    from autobatch.workload.user_code import describe, failed_part, remarks_on, user_frame

    code, is_logged, remarks = 1, True, remarks_on(error)
    if isinstance(error, KeyboardInterrupt | Terminated):
        how, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        line = f"{how}; what was saved so far stays for the next run"
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
    return one_line(line), code, is_logged


def _is_oom(error: BaseException) -> bool:
    """Check whether memory ran out, without importing torch only for that."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from autobatch.device.oom import is_oom

    return is_oom(error)


def new_log(kind: str = "") -> Path:
    """Return the path of a new log in the data directory, whose folder it makes."""
    import datetime

    from autobatch.device.profiles import data_home

    folder = data_home() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d-%H%M%S}-{os.getpid()}{kind}.log"


def report_failure(error: BaseException, command: str, is_verbose: bool, ranks: Ranks | None = None) -> int:
    """Print one line, unless another rank has done so, and return the exit code.

    Args:
        error: the failure.
        command: the command line, for the log.
        is_verbose: print the traceback, too.
        ranks: the processes that run the command together; None before they have met.
    """
    import platform
    import traceback

    from autobatch.distributed.ranks import Ranks

    line, code, is_logged = describe_failure(error)
    earlier = (ranks or Ranks()).fail(line, code)
    if earlier is not None:
        return earlier
    trace = "".join(traceback.format_exception(error))
    if is_logged:
        try:
            log = new_log()
            head = f"autobatch {__version__}, python {platform.python_version()}, in {os.getcwd()}"
            log.write_text(f"{command}\n{head}\n{trace}", encoding="utf-8", errors="backslashreplace")
            line += f"; full traceback: {log}"
        except OSError:
            line += "; for the traceback add --verbose"
    print_error(line)
    if is_verbose:
        sys.stderr.write(f"{printable_lines(trace)}\n")
    return code
