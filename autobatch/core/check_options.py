"""The check that the values of all options go through.

Values come from the command line, config files, environment variables and keywords of library calls
(`autobatch.cli.config_files` sets their precedence). Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE
from autobatch.core.knobs import parse_knobs
from autobatch.core.option_types import LARGEST_INTEGER, expected, plain_type, unknown_option
from autobatch.core.search_options import Options
from autobatch.core.text import is_text, quoted
from autobatch.core.units import TiB, parse_budget, parse_multiple

_Kind = TypeVar("_Kind", bound=Options)
_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|sim:.+")


def options_from(
    kind: type[_Kind], values: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> _Kind:
    """Check values, plain or as text, and build the options of a command from them.

    Args:
        kind: the structure of the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what messages call an option, if not by its own name (``--steps``).

    Raises:
        InputError: an option is unknown, missing or has a wrong value; the message names it and the value.
    """
    names = names or {}
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in values:
        if name not in fields:
            raise InputError(unknown_option(names.get(name, name), fields))
    checked: dict[str, Any] = {}
    for name, value in values.items():
        annotation = fields[name].type
        try:
            is_single = isinstance(value, str) and get_origin(plain_type(annotation)) is list
            checked[name] = msgspec.convert([value] if is_single else _plain(value), annotation, strict=False)
            is_valid = value is None or checked[name] is not None  # msgspec reads the text null as None
        except UNREADABLE:
            is_valid = False
        if not is_valid:
            raise InputError(f"{names.get(name, name)} must be {expected(annotation)}, found {quoted(value)}")
    for name, value in checked.items():
        _check_plain(names.get(name, name), value)
    for name, field in fields.items():
        if field.required and name not in checked:
            raise InputError(f"{names.get(name, name)} is missing: give {expected(field.type)}")
    _check(checked, names)
    return kind(**checked)


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


def _check(values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check what the types cannot express and no device or workload is needed for."""
    called = {name: names.get(name, name) for name in values}
    device = values.get("device")
    if device is not None and not _DEVICES.fullmatch(device):
        raise InputError(
            f"{called['device']} {quoted(device)} names no device: "
            "write auto, cuda, cuda:N, cpu or sim:PROFILE"
        )
    for name, parse in (
        ("memory_budget", lambda budget: parse_budget(budget, whole_bytes=TiB)),
        ("knobs", parse_knobs),
        ("size_multiple", parse_multiple),
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
    if values.get("static_shapes") and values.get("split") == "size":
        raise InputError(
            f"{called['static_shapes']} and {called['split']} size exclude each other: a split by size has "
            "micro-batches of many sizes; give one"
        )
