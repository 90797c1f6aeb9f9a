"""A workload found by its reference: ``file.py``, ``path/to/file.py:function`` or ``module:function``.

Python, NumPy and torch are seeded before the user's module is imported and before its function is called, in
every process alike. So a ``random_split`` or a ``random.shuffle`` there gives the same data in each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from autobatch.core.errors import InputError
from autobatch.core.text import LONGEST_VALUE, cut
from autobatch.workload.contract import Workload, is_model, kind_of
from autobatch.workload.user_code import user_code

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
                f"{place} has no function {name!r}, found {', '.join(own) or 'none'}: write {place}:FUNCTION"
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
            f"{name} must be an autobatch.Workload, a function that returns one, or a reference, found "
            f"{kind_of(make)}"
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
