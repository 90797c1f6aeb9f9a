"""The check that the values of all options go through, and the messages about wrong ones.

Values come from the command line, config files, environment variables and keywords of library calls
(`autobatch.cli.config_files` sets their precedence). Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE
from autobatch.core.knobs import parse_knobs
from autobatch.core.options import MOST_WORKERS, Options, fields_of
from autobatch.core.text import LONGEST_VALUE, is_text, printable, quoted
from autobatch.core.units import TiB, parse_budget
from autobatch.core.usual_words import answer_to

LARGEST_INTEGER = 2**63 - 1
"""Largest whole number of an option: torch and the files count in 64 bits."""
_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|sim:.+")


def options_from(
    command: str, values: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> Options:
    """Check values, plain or as text, and build the options of a command from them.

    Args:
        command: the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what messages call an option, if not by its own name (``--steps``).

    Raises:
        InputError: an option is unknown, missing or has a wrong value; the message names it and the value.
    """
    names = names or {}
    fields = fields_of(command)
    for name in values:
        if name not in fields:
            raise InputError(unknown_option(names.get(name, name), fields))
    checked = {
        name: _converted(names.get(name, name), value, fields[name].type) for name, value in values.items()
    }
    for name, value in checked.items():
        _check_plain(names.get(name, name), value)
    for name, field in fields.items():
        if command in field.about.required_by and checked.get(name) is None:
            found = f"must be {expected(field.type)}, found None"
            missing = f"is missing: give {expected(field.type)}"
            raise InputError(f"{names.get(name, name)} {found if name in checked else missing}")
    _check(command, checked, names)
    return Options(command=command).with_values(**checked)


def _converted(name: str, value: Any, annotation: Any) -> Any:
    """Return a value in the type of its option.

    Raises:
        InputError: it has another type, or is out of range.
    """
    try:
        is_single = isinstance(value, str) and get_origin(plain_type(annotation)) is list
        found = msgspec.convert([value] if is_single else _plain(value), annotation, strict=False)
        is_valid = value is None or found is not None  # msgspec reads the text null as None
    except UNREADABLE:
        found, is_valid = None, False
    if not is_valid:
        raise InputError(f"{name} must be {expected(annotation)}, found {quoted(value)}")
    return found


def _check_plain(name: str, value: object) -> None:
    """Check that a number fits the arithmetic, and that a text can be a file name and be printed as JSON.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, int) and value > LARGEST_INTEGER:
        raise InputError(f"{name} must be at most {LARGEST_INTEGER}, found {quoted(value)}")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not is_text(text):
            raise InputError(f"{name} must be text in UTF-8 without NUL, found {quoted(text)}")


def _plain(value: object) -> object:
    """Convert a path to text and a number of NumPy to Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _check(command: str, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check what the types cannot express and no device or workload is needed for."""
    called = {name: names.get(name, name) for name in values}
    device, ranks = values.get("device"), values.get("ranks")
    if device is not None and not _DEVICES.fullmatch(device):
        raise InputError(
            f"{called['device']} {quoted(device)} names no device: "
            "write auto, cuda, cuda:N, cpu or sim:PROFILE"
        )
    if ranks is not None and ranks > MOST_WORKERS and command != "estimate":
        raise InputError(
            f"{called['ranks']} must be a whole number from 1 to {MOST_WORKERS}, found '{ranks}'"
        )
    for name, parse in (
        ("memory_budget", lambda budget: parse_budget(budget, whole_bytes=TiB)),
        ("knobs", parse_knobs),
    ):
        if values.get(name) is not None:
            try:
                parse(values[name])
            except InputError as error:
                raise InputError(f"{called[name]}: {error}") from None
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise InputError(
            f"{called['steps']} {values['steps']} and {called['epochs']} {values['epochs']} exclude each "
            "other: give one"
        )


def plain_type(annotation: Any) -> Any:
    """Return the type of an option without its annotations: ``bool``, ``list[str]``, ``int | None``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values that an option can take; empty if its type does not list them."""
    plain = plain_type(annotation)
    if get_origin(plain) is not Literal:
        plain = next((part for part in get_args(plain) if get_origin(part) is Literal), plain)
    return get_args(plain) if get_origin(plain) is Literal else ()


def expected(annotation: Any) -> str:
    """Describe the values that an option accepts, for example ``a whole number of 1 or more``."""
    plain = plain_type(annotation)
    if plain is not annotation:
        limits = [one for one in get_args(annotation)[1:] if isinstance(one, Meta)]
        return _limited(plain, limits[0]) if limits else expected(plain)
    if get_origin(plain) is Literal:
        return f"one of {', '.join(get_args(plain))}"
    if get_origin(plain) is list:
        return "one or more names"
    if isinstance(plain, types.UnionType) or get_origin(plain) is not None:
        return " or ".join(expected(part) for part in get_args(plain) if part is not type(None))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[plain]


def unknown_option(asked: str, names: Iterable[str]) -> str:
    """Return the message about an option that does not exist, with the nearest name that does."""
    names = sorted(names)
    near = difflib.get_close_matches(asked, names, n=1)
    hint = answer_to(asked, names, str) or (
        f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    )
    return f"there is no option {printable(asked, limit=LONGEST_VALUE)}; {hint}"


def _limited(kind: type, meta: Meta) -> str:
    number = "a whole number" if kind is int else "a number"
    if meta.le is not None:
        return f"{number} from {meta.ge} to {meta.le}"
    if meta.lt is not None:
        return f"{number} over {meta.gt} and under {meta.lt}"
    return f"{number} of {meta.ge} or more" if meta.ge is not None else f"{number} over {meta.gt}"
