"""The user's own code: find a workload, and mark, describe and carry the errors of its parts.

A workload is found by its reference: ``file.py``, ``path/to/file.py:function`` or ``module:function``.
Python, NumPy and torch are seeded before the user's module is imported and before its function is called, in
every process alike. So a ``random_split`` or a ``random.shuffle`` there gives the same data in each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from autobatch.core.errors import AutobatchError, InputError, UserCodeError
from autobatch.core.text import LONGEST_VALUE, cut, error_text, quoted
from autobatch.workload.contract import Workload, is_model, kind_of

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
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
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


WorkloadSource = Workload | Callable[[], Workload] | str | None
"""A workload, a function that returns it, or a reference to it; None for the demo."""
DEMO = "autobatch.workload.demo:workload"
NAMED_MODEL = "hf:"
"""Begin of the name of a Hugging Face model, which ``estimate`` takes in place of a reference."""


def find_workload(workload: object, seed: int = 0) -> Workload:
    """Return a workload: as it is, made by a function, named by a reference, or the demo for None.

    A workload without a name takes the name of its function; that of its file if the function is called
    ``workload``.

    Args:
        workload: a workload, a function that returns one, a reference, or None.
        seed: of the run, which seeds the user's module and function.

    Raises:
        InputError: the reference is invalid, or the value is no workload, function or reference.
    """
    if workload is None or isinstance(workload, str):
        place, name = check_reference(workload or DEMO)
        # Only here: the import of torch takes seconds, and a reference is checked before.
        from autobatch.workload.rng import seeded

        with seeded(seed):
            if place.endswith(".py"):
                module = _load_file(Path(place))
            else:
                with user_code(f"module {place}"):  # and its parent packages
                    module = importlib.import_module(place)
        name = name or Workload.name
        if not hasattr(module, name):
            functions = inspect.getmembers(module, inspect.isfunction)
            own = [name for name, value in functions if value.__module__ == module.__name__]
            raise InputError(
                f"{place} has no function {name!r}, found {', '.join(own) or 'none'}: write {place}:FUNCTION "
                "for one that returns an autobatch.Workload; `autobatch init` writes an example"
            )
        found = _made(getattr(module, name), f"{name} in {place}", seed)
        if found.name != Workload.name:
            return found
        # Two workloads of one file need two names, or they would share a cached limit; and so do the
        # functions of two files, which are often called the same.
        stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
        return replace(found, name=stem if name == Workload.name else name)
    return _made(workload, getattr(workload, "__name__", "the workload"), seed)


def _made(make: Any, name: str, seed: int) -> Workload:
    """Return a workload as it is, or call the user's function with seeded generators.

    Raises:
        InputError: it is neither, or the function returns something else.
    """
    if isinstance(make, Workload):
        return make
    if is_model(make):
        raise InputError(f"{name} is a model: give a function that builds it as Workload(model=…)")
    if not callable(make):
        raise InputError(
            f"{name} must be an autobatch.Workload, a function that returns one, or a reference like "
            f"'train.py:workload', found {kind_of(make)}"
        )
    from autobatch.workload.rng import seeded

    with seeded(seed), user_code(f"function {name}", make):
        made = make()
    if not isinstance(made, Workload):
        raise InputError(f"{name} returned {kind_of(made)}, not an autobatch.Workload")
    return made


def is_named_model(workload: object) -> TypeGuard[str]:
    """Return whether a workload is the name of a model, ``hf:NAME_OR_FOLDER``."""
    return isinstance(workload, str) and workload.startswith(NAMED_MODEL)


def check_reference(reference: str) -> tuple[str, str]:
    """Check a reference as far as is possible without running code; return its place and its function.

    It takes milliseconds, and imports no torch.

    Raises:
        InputError: it is no reference, or there is no such file or module.
    """
    if is_named_model(reference):
        raise InputError(
            f"{cut(reference, LONGEST_VALUE)} is a model without data, which only autobatch estimate takes: "
            "write a workload to run it"
        )
    place, colon, function = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if place.endswith(".py") and (function or not colon):
        if not os.path.isfile(place):
            raise InputError(f"there is no file {cut(place, LONGEST_VALUE)} (looked from {Path.cwd()})")
        return place, function
    if not all(part.isidentifier() for part in place.split(".")) or (colon and not function):
        raise InputError(
            f"{reference!r} is not a workload: write file.py, path/to/file.py:function or module:function"
        )
    _make_importable(Path.cwd())
    package = place.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise InputError(f"there is no module {place!r} to import from {Path.cwd()}")
    return place, function


def _load_file(path: Path) -> Any:
    _make_importable(path.resolve().parent)
    # Registered so that worker processes and pickles find its definitions, but never in place of another
    # module.
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    name = path.stem if known is None else f"{path.stem}_workload"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_code(f"file {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
