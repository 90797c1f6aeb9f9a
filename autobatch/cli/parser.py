"""The words of a command, a config file and environment variables become a workload and checked options.

Later sources win: ``autobatch.toml`` (else ``[tool.autobatch]`` of ``pyproject.toml``), ``AUTOBATCH_…``
variables, the command line. Every value keeps the name of its source, so that an error says where to correct
it. `autobatch.core.options` declares the options and checks every value, wherever it was given.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.files import read_toml
from autobatch.core.options import (
    PLANS,
    TAKEN_BY,
    TEXT,
    Option,
    Options,
    all_fields,
    fields_of,
    options_from,
    unknown_option,
)
from autobatch.core.text import quoted

HELP_WORDS = frozenset({"-h", "--help", "--help-all"})
HELP_COLUMN = 27
LENGTHS = {"steps", "epochs"}
"""Options that exclude each other: those of the latest source count."""
PREFIX = "AUTOBATCH_"
NO_OPTIONS = frozenset({"AUTOBATCH_HOME", "AUTOBATCH_RECORDER", "AUTOBATCH_EARLIER_OUT"})
"""Variables that begin with the prefix but are no options."""


class Given(NamedTuple):
    """Value of an option, with its source."""

    value: Any
    name: str
    """Name of the option in its source: ``--steps``, ``AUTOBATCH_STEPS``, ``steps in autobatch.toml``."""


def parse(name: str, words: Sequence[str]) -> tuple[str | None, Options]:
    """Return the workload and the options of a command.

    Raises:
        InputError: a word or a value is wrong; the message is one line.
    """
    values, places = read_words(name, words, fields_of(name).values())
    if len(places) > 1:
        shown = " and ".join(map(quoted, places[:2]))
        raise InputError(f"give one WORKLOAD, found {shown}; see autobatch {name} --help")
    return options_of(name, values | ({"WORKLOAD": places[0]} if places else {}))


def options_of(name: str, on_line: Mapping[str, Any]) -> tuple[str | None, Options]:
    """Return the workload and the options of a command, with those of all sources.

    Args:
        name: the command.
        on_line: the values on the command line, by the names of their options there, and the ``WORKLOAD``.

    Raises:
        InputError: a value is wrong, or an option in a file or in the environment is unknown.
    """
    words = {
        word.lstrip("-").replace("-", "_").lower(): Given(value, word) for word, value in on_line.items()
    }
    given: dict[str, Given] = {}
    for layer in (_read_file(), _read_variables(), words):
        if LENGTHS & layer.keys():
            given = {option: found for option, found in given.items() if option not in LENGTHS}
        given |= layer
    place, label = given.get("workload", (None, ""))
    if place is not None and not (isinstance(place, str) and re.fullmatch(f"{TEXT}+", place)):
        raise InputError(
            f"{label} must be file.py, file.py:function or module:function in UTF-8, found {quoted(place)}"
        )
    known = {option: given[option] for option in fields_of(name) if option in given}
    names = {option: spelled(option) for option in fields_of(name)}
    names |= {option: found.name for option, found in known.items()}
    return place, options_from(name, {option: found.value for option, found in known.items()}, names=names)


def read_words(
    command: str, words: Sequence[str], fields: Iterable[Option]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options among the words of a command, as text, and the other words.

    Args:
        command: the command.
        words: its words; after ``--`` there are no options.
        fields: its options. A switch has a ``--no-`` form, too.

    Raises:
        InputError: an option is unknown or lacks its value.
    """
    options = {spelled(field.name): field for field in fields}
    negated = {f"--no-{option[2:]}": option for option, field in options.items() if field.is_switch}
    values: dict[str, Any] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        option, has_value, value = word.partition("=")
        if word == "--":
            return values, [*others, *left]
        if _is_value(word):
            others.append(word)
            continue
        field = options.get(negated.get(option, option))
        if field is None:
            raise InputError(unknown_option(option, options, command=command))
        if field.is_switch:
            if has_value:
                raise InputError(f"{option} takes no value")
            values[spelled(field.name)] = option not in negated
            continue
        found = [value] if has_value else []
        takes_all = field.is_list and not field.choices
        while left and not has_value and (takes_all or not found) and _is_value(left[0]):
            found.append(left.pop(0))
        if not found:
            raise InputError(f"{option} has no value: give {field.expected}")
        values[option] = [*values.get(option, []), *found] if field.is_list else found[0]
    return values, others


def _is_value(word: str) -> bool:
    return word == "-" or not word.startswith("-")


def spelled(option: str) -> str:
    """Return an option as the command line has it: ``--target-batch``."""
    return f"--{option.replace('_', '-')}"


def _read_file() -> dict[str, Given]:
    """Read the config file of the working directory; the options of no command are refused."""
    path = next((path for path in map(Path, ("autobatch.toml", "pyproject.toml")) if path.is_file()), None)
    if path is None:
        return {}
    table: Any = read_toml(path.absolute())
    for name in ("tool", "autobatch") if path.name == "pyproject.toml" else ():
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{path.absolute()}: {name} must be a table, found {quoted(table)}")
    _check_names(table, {*all_fields(), "workload"}, str(path.absolute()))
    return {name: Given(value, f"{name} in {path.absolute()}") for name, value in table.items()}


def _read_variables() -> dict[str, Given]:
    """Read the options in ``AUTOBATCH_…`` variables, as ``AUTOBATCH_STEPS=3``. An empty one is not set."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and name not in NO_OPTIONS and value
    }
    _check_names(found, {PREFIX + name.upper() for name in (*all_fields(), "workload")}, "the environment")
    return {name.removeprefix(PREFIX).lower(): Given(value, name) for name, value in found.items()}


def _check_names(asked: Collection[str], names: set[str], place: str) -> None:
    for name in asked:
        if name not in names:
            raise InputError(f"{place}: {unknown_option(name, names)}")


def help_of(command: str, summary: str, *, shows_all: bool) -> str:
    """Return the help of a command that opens a workload, with the common options, or all of them."""
    needs = " --target-batch N" if command in PLANS else ""
    named = ", or hf:NAME_OR_FOLDER" if command == "estimate" else ""
    lines = [f"usage: autobatch {command} [WORKLOAD]{needs} [options]", "", f"{summary.capitalize()}.", ""]
    lines.append(f"  WORKLOAD  file.py or module:function{named} (default: the demo)")
    fields = [field for field in fields_of(command).values() if shows_all or not field.rare]
    for group in TAKEN_BY:
        own = [field for field in fields if field.group == group]
        lines += ["", f"{group}:", *option_lines(own)] if own else []
    lines += ["", "-h, --help shows the common options, --help-all all of them."]
    return "\n".join(lines)


def option_lines(fields: Sequence[Option]) -> list[str]:
    """Return the help of options, in the width of the terminal."""
    lines = []
    width, indent = shutil.get_terminal_size().columns, " " * HELP_COLUMN
    for field in fields:
        is_shown = isinstance(field.default, str | int | float) and field.default is not False
        hint = f" (default: {field.default})" if is_shown else ""
        head = f"  {spelled(field.name)} {field.placeholder}".rstrip()
        if len(head) >= HELP_COLUMN:
            lines.append(head)
            head = ""
        text = f"{head:<{HELP_COLUMN}}{field.text}{hint}"
        lines += textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    return lines
