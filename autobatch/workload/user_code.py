"""TODO."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autobatch.core.errors import AutobatchError, UserCodeError

if TYPE_CHECKING:
    pass


@contextmanager
def user_code(part: str) -> Iterator[None]:
    """Note on any error that it came out of the user's own ``part``; the error itself passes untouched."""
    try:
        yield
    except AutobatchError:
        raise
    except (Exception, SystemExit) as error:
        mark_user_error(error, part)
        raise


_BLAME = "raised by the workload: "


def mark_user_error(error: BaseException, part: str) -> None:
    """Note (PEP 678) on an error that it came out of the user's own ``part``, once."""
    if failed_part(error) is None:
        error.add_note(_BLAME + part)


def failed_part(error: BaseException) -> str | None:
    """The part of the workload that an error came out of, if it was noted."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_BLAME):
            return str(note.removeprefix(_BLAME))
    return None


def remarks_on(error: BaseException) -> list[str]:
    """What was noted on an error besides: neither a traceback nor whose it is."""
    notes = (str(note) for note in getattr(error, "__notes__", ()))
    return [note for note in notes if "\n" not in note and not note.startswith(_BLAME)]


def describe(error: BaseException) -> str:
    """One line on an error of the user's code: the part, the exception, and their file and line."""
    place = user_frame(error)
    part = failed_part(error)
    whose = f"the workload's {part.removeprefix('the ')}" if part else "the workload"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        text = (str(error).splitlines() or [""])[0]
        did = f"raised {type(error).__name__}: {text}".removesuffix(": ")
    return f"{whose} {did}" + (f" ({place})" if place else "")


def to_picklable(error: BaseException) -> AutobatchError:
    """An error that can be raised in another process, with the traceback of this one as a note."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, AutobatchError) and type(error).__module__ == AutobatchError.__module__:
        carried = error.with_traceback(None)
        carried.__cause__ = carried.__context__ = None
    else:
        # A class of the user's own may not be known over there.
        carried = UserCodeError(describe(error))
    carried.add_note(text)
    return carried


def user_frame(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame that is the user's: neither ours nor an installed package's."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    foreign = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
    found = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(foreign) and not {"site-packages", "dist-packages"} & set(Path(file).parts):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
