"""The words of a command, config files and environment variables become a workload and checked options.

Later sources win: the user's ``config.toml``, ``[tool.autobatch]`` of ``pyproject.toml``, ``autobatch.toml``
(which replaces the table of ``pyproject.toml``), ``AUTOBATCH_…`` variables, the command line. Every value
keeps the name of its source, so that an error can say where to correct it.

argparse splits the words and lays out the help. Every value stays text until `autobatch.core.options`
checks it, so that messages about a wrong value read the same wherever it was given.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.files import read_toml
from autobatch.core.knobs import KNOBS
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
from autobatch.core.text import LONGEST_VALUE, printable, quoted

SUMMARIES = {
    "fit": "Probe, plan, tune and train. Save the limit, the weights and a report.",
    "plan": "Find the largest micro-batch that fits, and split the target batch exactly.",
    "probe": "Find the largest micro-batch that fits.",
    "tune": "Probe, plan, and measure which configuration is fastest, with Optuna.",
    "estimate": "Predict the largest micro-batch for GPUs that need not be present.",
}
SHELLS = ("bash", "zsh", "fish")
HELP_WORDS = ("-h", "--help", "--help-all")
HELP_COLUMN = 27
PREFIX = "AUTOBATCH_"
NO_OPTIONS = frozenset({"AUTOBATCH_HOME", "AUTOBATCH_RECORDER", "AUTOBATCH_EARLIER_OUT"})
"""Variables that begin with the prefix but are no options."""


class OptionValue(NamedTuple):
    """Value of an option, with its source."""

    value: Any
    name: str
    """Name of the option in its source: ``--steps``, ``AUTOBATCH_STEPS``, ``steps in autobatch.toml``."""


Layer = dict[str, OptionValue]
"""The options that one source gives, by name."""


def parse(
    name: str, arguments: list[str], *, folder: Path, environ: Mapping[str, str]
) -> tuple[str | None, Options]:
    """Return the workload and the options of a command.

    Args:
        name: the command.
        arguments: the words after the command.
        folder: the working directory, where config files are read.
        environ: the environment variables.

    Raises:
        InputError: a word or a value is wrong; the message is one line.
        SystemExit: help was asked for, and printed.
    """
    import platformdirs

    user_config = Path(platformdirs.user_config_dir("autobatch")) / "config.toml"
    project = folder / "autobatch.toml"
    files = [user_config, project if project.is_file() else folder / "pyproject.toml"]
    known = ChainMap(_read_variables(environ), *(_read_file(path) for path in files[::-1] if path.is_file()))
    given = known.new_child(_read_words(name, arguments, known))
    workload = given.get("workload")
    place = None if workload is None else workload.value
    if workload is not None and not (isinstance(place, str) and re.fullmatch(f"{TEXT}+", place)):
        raise InputError(
            f"{workload.name} must be file.py, file.py:function or module:function in UTF-8, found "
            f"{quoted(place)}"
        )
    lengths = {"steps", "epochs"}  # which exclude each other: those of the latest source count
    latest = next((layer for layer in given.maps if lengths & layer.keys()), {})
    counted = given.keys() - (lengths - latest.keys())
    options = {option: given[option] for option in fields_of(name) if option in counted}
    names = {option: _spelled(option) for option in fields_of(name)}
    names |= {option: one.name for option, one in options.items()}
    values = {option: one.value for option, one in options.items()}
    return place, options_from(name, values, names=names)


def _read_file(path: Path) -> Layer:
    table: Any = read_toml(path)
    for name in ("tool", "autobatch") if path.name == "pyproject.toml" else ():
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} must be a table, found {quoted(table)}")
    for name in table:
        if name not in _all_names():
            raise InputError(f"{path}: {unknown_option(name, _all_names())}")
    return {name: OptionValue(value, f"{name} in {path}") for name, value in table.items()}


def _read_variables(environ: Mapping[str, str]) -> Layer:
    """Read the options in ``AUTOBATCH_…`` variables (``AUTOBATCH_MEMORY_BUDGET=6GiB``).

    An empty variable counts as not set.
    """
    names = {PREFIX + name.upper(): name for name in _all_names()}
    values: Layer = {}
    for key, value in environ.items():
        if not key.startswith(PREFIX) or key in NO_OPTIONS or not value:
            continue
        if key not in names:
            raise InputError(f"the environment: {unknown_option(key, names)}")
        field = all_fields().get(names[key])
        is_list = field is not None and field.is_list
        values[names[key]] = OptionValue(value.split() if is_list else value, key)
    return values


def _read_words(name: str, arguments: list[str], known: Mapping[str, OptionValue]) -> Layer:
    """Read the options that the command line gives, as text."""
    fields = {_spelled(option): field for option, field in fields_of(name).items()}
    try:
        parser = _parser(name, known, shows_all="--help-all" in arguments)
        found, extra = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        option = (error.argument_name or "").split("/")[0]
        lacks = f"has no value: give {fields[option].expected}"
        raise InputError(f"{option} {'takes no value' if fields[option].is_switch else lacks}") from None
    for word in extra:
        if word.startswith("-"):
            raise InputError(unknown_option(word.partition("=")[0], fields, command=name))
    if extra:
        raise InputError(
            f"give one WORKLOAD, found {quoted(found.workload)} and {quoted(extra[0])}; "
            f"see autobatch {name} --help"
        )
    return {
        option: OptionValue(value, "WORKLOAD" if option == "workload" else _spelled(option))
        for option, value in vars(found).items()
        if value is not None
    }


def _parser(name: str, known: Mapping[str, OptionValue], *, shows_all: bool) -> argparse.ArgumentParser:
    """Build the parser of a command; its help shows the common options, or all of them."""
    fields = fields_of(name).values()
    needs = {"target_batch": " --target-batch N"} if name in PLANS else {}
    named = ", or hf:NAME_OR_FOLDER" if name == "estimate" else ""
    width = shutil.get_terminal_size().columns
    parser = argparse.ArgumentParser(
        usage=f"autobatch {name} [WORKLOAD]{''.join(needs.values())} [options]",
        description=SUMMARIES[name],
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=HELP_COLUMN, width=width),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    groups = {group: parser.add_argument_group(group) for group in TAKEN_BY}
    groups["batch"].add_argument(
        "workload",
        nargs="?",
        metavar="WORKLOAD",
        help=f"file.py or module:function{named}. {_hint(known.get('workload'), 'demo')}",
    )
    for field in sorted(fields, key=lambda one: (one.name not in needs, one.rare)):
        is_missing = field.name in needs and field.name not in known
        hint = "(required)" if is_missing else _hint(known.get(field.name), field.default)
        groups[field.group].add_argument(
            _spelled(field.name),
            help=f"{field.text} {hint}".strip().replace("%", "%%")
            if shows_all or not field.rare
            else argparse.SUPPRESS,
            **_keywords_of(field),
        )
    groups["output"].add_argument(*HELP_WORDS, action="help", help="Show the common options, or all of them.")
    return parser


def completion_script(shell: str, profiles: Iterable[str], others: Mapping[str, str]) -> str:
    """Return the script with which a shell completes commands, options, choices and paths.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.
        profiles: names of the hardware profiles.
        others: the help of each command that runs no workload.

    Raises:
        InputError: the library that writes the script is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise InputError(f"completion needs the package shtab ({error}): pip install shtab") from None
    by_option = {
        "profile": [*profiles],
        "knobs": [one.name for one in KNOBS],
        "device": ("auto", "cpu", "cuda"),
    }
    by_metavar = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "WORKLOAD": shtab.FILE}
    top = argparse.ArgumentParser("autobatch")
    commands = top.add_subparsers()
    for name, summary in SUMMARIES.items():
        parser = _parser(name, {}, shows_all=True)
        for action in parser._actions:
            field = fields_of(name).get(action.dest)
            found = by_option.get(action.dest) or (field and field.choices)
            action.choices = list(found) if found else None
            if isinstance(action.metavar, str) and action.metavar in by_metavar:
                action.complete = by_metavar[action.metavar]  # type: ignore[attr-defined]
        commands.add_parser(name, parents=[parser], add_help=False, help=summary)
    for name, text in others.items():
        parser = commands.add_parser(name, help=" ".join(text.split("\n\n")[1].split(".")[0].split()))
        parser.add_argument("--json", action="store_true")
        parser.add_argument("name", nargs="*").complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(top, shell))


def _keywords_of(field: Option) -> dict[str, Any]:
    """Return argparse's keywords for a switch, or for an option that takes one word or several."""
    if field.is_switch:
        return {"action": argparse.BooleanOptionalAction}
    if field.is_list and not field.choices:
        return {"action": "extend", "nargs": "+", "metavar": field.placeholder}
    return {"metavar": field.placeholder} | ({"action": "append"} if field.is_list else {})


def _hint(given: OptionValue | None, default: object) -> str:
    """Return the end of an option's help: its value if none is given on the command line."""
    if given is not None:
        value = given.value
        shown = printable(value, limit=LONGEST_VALUE) if isinstance(value, str) else quoted(value)
        return f"(default: {shown}, from {printable(given.name)})"
    is_shown = isinstance(default, str | int | float) and default is not False
    return f"(default: {default})" if is_shown else ""


def _spelled(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _all_names() -> set[str]:
    return {"workload", *all_fields()}
