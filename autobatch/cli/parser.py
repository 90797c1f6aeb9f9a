"""The words of a command and a config file become a workload and checked options.

The command line wins over ``autobatch.toml``, or without it ``[tool.autobatch]`` of ``pyproject.toml``. An
error says where to correct a value. `autobatch.core.options` declares the options and checks every value.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.files import read_toml
from autobatch.core.options import (
    PLANS,
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

EXCLUSIVE = ({"steps", "epochs"}, {"workload", "snapshot"})
"""What excludes each other: that of the latest source counts."""
REFERENCE = "file.py, file.py:function or module:function in UTF-8"
WORKLOAD = Option("", type=Annotated[str, Meta(pattern=f"^{TEXT}+$", description=REFERENCE)])
WORKLOAD_HELP = """\
usage: autobatch {command} [WORKLOAD]{needs} [options]

{summary}.

  WORKLOAD  file.py or module:function{named} (default: the demo)
OPTIONS
-h, --help shows the common options, --help-all all of them."""


class HelpAsked(Exception):  # noqa: N818 - no fault
    """The words of a command ask for its help, which is the message."""


class Parser(argparse.ArgumentParser):
    """Parser of the words of a command."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as an `InputError`."""
        line = message.removeprefix("argument ").replace(": expected one argument", " has no value after it")
        raise InputError(line)


def parse(name: str, summary: str, words: Sequence[str]) -> tuple[str | None, Options]:
    """Return the workload and the options of a command.

    Raises:
        HelpAsked: the words ask for help, which begins with the summary.
        InputError: a word or a value is wrong; the message is one line.
    """
    text = WORKLOAD_HELP.format(
        command=name,
        needs=" --target-batch N" if name in PLANS else "",
        summary=f"{summary[0].upper()}{summary[1:]}",
        named=", or hf:NAME_OR_FOLDER" if name == "estimate" else "",
    )
    values, places = read_words(name, text, words, fields_of(name))
    if len(places) > 1:
        shown = " and ".join(map(quoted, places[:2]))
        raise InputError(f"give one WORKLOAD, found {shown}; see autobatch {name} --help")
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
    taken = on_line.keys() | {name for names in EXCLUSIVE if names & on_line.keys() for name in names}
    in_file = {option: value for option, value in in_file.items() if option not in taken}
    given, fields = {**in_file, **on_line}, fields_of(name)
    place = WORKLOAD.convert(given.pop("workload", None), "WORKLOAD")
    values = {option: value for option, value in given.items() if option in fields}
    names = {option: f"{option} in {path}" if option in in_file else spelled(option) for option in fields}
    return place, options_from(name, values, names=names)


def read_words(
    command: str, text: str, words: Sequence[str], options: Mapping[str, Option]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options among the words of a command by name, and the other words.

    Args:
        command: the command.
        text: its help, with OPTIONS in place of the options.
        words: its words.
        options: its options by name. A switch has a ``--no-`` form, too.

    Raises:
        HelpAsked: a word asks for the help.
        InputError: an option is unknown, or its value is missing or wrong.
    """
    before, _, after = text.partition("OPTIONS\n")
    parser = Parser(
        usage=argparse.SUPPRESS,
        description=before,
        epilog=after,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=27),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    groups = {
        title: parser.add_argument_group(title or "options")
        for title in dict.fromkeys(option.group for option in options.values())
    }
    for name, option in options.items():
        add, flag = groups[option.group].add_argument, spelled(name)
        is_shown = isinstance(option.default, str | int | float) and option.default is not False
        default = f" (default: {option.default})" if is_shown else ""
        is_hidden = option.rare and "--help-all" not in words
        hint = argparse.SUPPRESS if is_hidden else f"{option.text}{default}".replace("%", "%%")
        if option.is_switch:
            add(flag, action="store_true", help=hint)
            add(f"--no-{flag[2:]}", action="store_false", dest=name, help=argparse.SUPPRESS)
        elif option.is_list and not option.choices:
            add(flag, action="extend", nargs="+", metavar=option.placeholder, help=hint)
        else:
            action = "append" if option.is_list else "store"
            add(flag, action=action, metavar=option.placeholder, help=hint)
    if not {"-h", "--help", "--help-all"}.isdisjoint(words):
        raise HelpAsked(parser.format_help().rstrip())
    parser.add_argument("others", nargs="*", help=argparse.SUPPRESS)
    found, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        flags = [spelled(name) for name in options]
        raise InputError(unknown_option(unknown[0].partition("=")[0], flags, command=command))
    others = found.__dict__.pop("others", [])
    values = {name: options[name].convert(value, spelled(name)) for name, value in vars(found).items()}
    return values, others


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
