"""Errors of the user's own code: mark them, describe them, and carry them between processes."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from autobatch.core.errors import AutobatchError, InputError, UserCodeError
from autobatch.core.text import error_text, quoted

_MARK = "raised by the workload: "


class user_code:  # noqa: N801 - reads as a statement; a generator would cost more in each micro-batch
    """Mark every error within the block as raised by ``part`` of the workload, and let it pass.

    What is refused within the block gets the line of the ``function``, if it is known.
    """

    __slots__ = ("_function", "_part")

    def __init__(self, part: str, function: object = None) -> None:
        self._part, self._function = part, function

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Mark the error, if there is one."""
        if isinstance(error, Exception | SystemExit):
            mark_user_error(error, self._part, self._function)


def mark_user_error(error: BaseException, part: str, function: object = None) -> None:
    """Add a note (PEP 678) that ``part`` of the workload raised the error, unless it has one or is ours.

    The note has the line of the function if its result was refused, or if it takes other arguments.
    """
    place = place_of(function)
    if type(error) is InputError and place and not remarks_on(error):
        error.add_note(f"look at the workload's {part}{place}")
    if not isinstance(error, AutobatchError) and failed_part(error) is None:
        # An error of the call itself has no line of the user's yet.
        error.add_note(_MARK + part + (place if user_frame(error) is None else ""))


def failed_part(error: BaseException) -> str | None:
    """Return the part of the workload that raised an error; None if it is not marked."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_MARK):
            return str(note.removeprefix(_MARK))
    return None


def remarks_on(error: BaseException) -> list[str]:
    """Return the other notes on an error, without tracebacks and marks."""
    notes = (str(note) for note in getattr(error, "__notes__", ()))
    return [note for note in notes if "\n" not in note and not note.startswith(_MARK)]


def describe(error: BaseException) -> str:
    """Describe an error of the user's code in one line: the part, the exception, the file and line."""
    place = user_frame(error)
    part = failed_part(error)
    whose = f"the workload's {part.removeprefix('the ')}" if part else "the workload"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else quoted(error.code)})"
    else:
        did = f"raised {type(error).__name__}: {error_text(error, first_line=True)}".removesuffix(": ")
    return f"{whose} {did}" + (f" ({place})" if place else "")


def to_picklable(error: BaseException) -> AutobatchError:
    """Return an error that another process can raise, with this process's traceback as a note."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, AutobatchError) and type(error).__module__ == AutobatchError.__module__:
        carried = error.with_traceback(None)
        carried.__cause__ = carried.__context__ = None
    else:
        # The other process may not know a class of the user's.
        carried = UserCodeError(describe(error))
    carried.add_note(text)
    return carried


def place_of(function: object) -> str:
    """Return the file and line of a function in brackets; empty for anything else."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def user_frame(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame outside autobatch and installed packages.

    Returns:
        None if there is no such frame.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    foreign = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
    place = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(foreign) and not {"site-packages", "dist-packages"} & set(Path(file).parts):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
