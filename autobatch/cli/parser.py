"""The words of a command and a config file become a workload and checked options.

The command line wins over ``autobatch.toml``, or without it ``[tool.autobatch]`` of ``pyproject.toml``. An
error says where to correct a value. `autobatch.core.options` declares the options and checks every value.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

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
    spelled,
    unknown_option,
)
from autobatch.core.text import quoted

HELP_WORDS = frozenset({"-h", "--help", "--help-all"})
HELP_COLUMN = 27
LENGTHS = {"steps", "epochs"}
"""Options that exclude each other: those of the latest source count."""
REFERENCE = "file.py, file.py:function or module:function in UTF-8"
WORKLOAD = Option("", type=Annotated[str, Meta(pattern=f"^{TEXT}+$", description=REFERENCE)])


def parse(name: str, words: Sequence[str]) -> tuple[str | None, Options]:
    """Return the workload and the options of a command.

    Raises:
        InputError: a word or a value is wrong; the message is one line.
    """
    values, places = read_words(name, words, fields_of(name).values())
    if len(places) > 1:
        shown = " and ".join(map(quoted, places[:2]))
        raise InputError(f"give one WORKLOAD, found {shown}; see autobatch {name} --help")
    if places and "snapshot" in values:
        raise InputError(
            f"--snapshot stands in place of a WORKLOAD, found {quoted(places[0])} too: leave it out"
        )
    return options_of(name, values | ({"workload": places[0]} if places else {}))


def options_of(name: str, on_line: Mapping[str, Any]) -> tuple[str | None, Options]:
    """Return the workload and the options of a command, those of the config file included.

    Args:
        name: the command.
        on_line: the values on the command line, by name; that of ``workload`` too.

    Raises:
        InputError: a value is wrong, or an option in the file is unknown.
    """
    path, in_file = _read_file()
    taken = {*on_line, *(LENGTHS if LENGTHS & on_line.keys() else ())}
    in_file = {option: value for option, value in in_file.items() if option not in taken}
    given = {**in_file, **on_line}

    def label(option: str) -> str:
        return f"{option} in {path}" if option in in_file else spelled(option)

    place = WORKLOAD.convert(given.pop("workload", None), "WORKLOAD")
    fields = fields_of(name)
    values = {option: value for option, value in given.items() if option in fields}
    return place, options_from(name, values, names={option: label(option) for option in fields})


def read_words(
    command: str, words: Sequence[str], fields: Iterable[Option]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options among the words of a command, as text by name, and the other words.

    Args:
        command: the command.
        words: its words; after ``--`` there are no options.
        fields: its options. A switch has a ``--no-`` form, too.

    Raises:
        InputError: an option is unknown or lacks its value.
    """
    options = {spelled(field.name): field for field in fields}
    negated = {f"--no-{spelled(field.name)[2:]}": field for field in options.values() if field.is_switch}
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
        field = options.get(option) or negated.get(option)
        if field is None:
            raise InputError(unknown_option(option, options, command=command))
        if field.is_switch:
            if has_value:
                raise InputError(f"{option} takes no value")
            values[field.name] = option in options
            continue
        found = [value] if has_value else []
        takes_all = field.is_list and not field.choices
        while left and not has_value and (takes_all or not found) and _is_value(left[0]):
            found.append(left.pop(0))
        if not found:
            if left and left[0][1:2].isdigit():
                raise InputError(f"{option} must be {field.expected}, found {quoted(left[0])}")
            raise InputError(f"{option} has no value: give {field.expected}")
        values[field.name] = [*values.get(field.name, []), *found] if field.is_list else found[0]
    return values, others


def _is_value(word: str) -> bool:
    return word == "-" or not word.startswith("-")


def _read_file() -> tuple[Path, dict[str, Any]]:
    """Return the config file of the working directory, and its options.

    Raises:
        InputError: it is no such table, or an option is of no command, or has a wrong value, also if the
            command does not take it, or takes another value from the command line.
    """
    path = next((path for path in map(Path, ("autobatch.toml", "pyproject.toml")) if path.is_file()), None)
    if path is None:
        return Path(), {}
    path = path.absolute()
    table: Any = read_toml(path)
    for name in ("tool", "autobatch") if path.name == "pyproject.toml" else ():
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} must be a table, found {quoted(table)}")
    known = all_fields() | {"workload": WORKLOAD}
    if unknown := [name for name in table if name not in known]:
        raise InputError(f"{path}: {unknown_option(unknown[0], known)}")
    for option, value in table.items():
        known[option].convert(value, f"{option} in {path}")
    return path, table


def help_of(command: str, summary: str, *, shows_all: bool) -> str:
    """Return the help of a command that opens a workload, with the common options, or all of them."""
    needs = " --target-batch N" if command in PLANS else ""
    named = ", or hf:NAME_OR_FOLDER" if command == "estimate" else ""
    lines = [f"usage: autobatch {command} [WORKLOAD]{needs} [options]", ""]
    lines += [f"{summary[0].upper()}{summary[1:]}.", ""]
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
