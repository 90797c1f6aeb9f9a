"""The command line of a command: its words become a workload and checked options.

argparse splits the words and lays out the help. Every value stays text until `autobatch.core.options` checks
it, so that messages about a wrong value read the same wherever it was given.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from autobatch.cli.config_files import OptionValue, configured, layered
from autobatch.core.check_options import choices_of, expected, options_from, plain_type, unknown_option
from autobatch.core.errors import InputError
from autobatch.core.options import Options, fields_of
from autobatch.core.text import LONGEST_VALUE, is_text, printable, quoted

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

SUMMARIES = {
    "fit": "Probe, plan, tune and train. Save the limit, the weights and a report.",
    "plan": "Find the largest micro-batch that fits, and split the target batch exactly.",
    "probe": "Find the largest micro-batch that fits.",
    "tune": "Probe, plan, and measure which configuration is fastest, with Optuna.",
    "estimate": "Predict the largest micro-batch for GPUs that need not be present.",
}
TITLES = {
    "batch": "batch",
    "device": "devices",
    "ranks": "devices",
    "search": "search",
    "train": "training",
    "tune": "tuning",
    "output": "output",
}
"""Titles of the help by the section of an option, in its order."""
HELP_WORDS = ("-h", "--help", "--help-all")
HELP_COLUMN = 27


class _Parser(argparse.ArgumentParser):
    """Parser whose help raises if it cannot be written; argparse hides that."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help."""
        (sys.stdout if file is None else file).write(self.format_help())


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

    fields = fields_of(name)
    user_config = Path(platformdirs.user_config_dir("autobatch")) / "config.toml"
    known = configured(folder, user_config, environ)
    given = layered(known, _read(name, arguments, known))
    options = {option: given[option] for option in fields if option in given}
    workload = given.get("workload")
    if workload is not None:
        _check_place(workload)
    names = {option: _spelled(option) for option in fields}
    names |= {option: value.name for option, value in options.items()}
    return (
        None if workload is None else workload.value,
        options_from(name, {option: value.value for option, value in options.items()}, names=names),
    )


def _check_place(workload: OptionValue) -> None:
    """Check the reference of a workload.

    Raises:
        InputError: it is no text, is empty, or has bytes that the locale cannot decode.
    """
    place = workload.value
    if isinstance(place, str) and not is_text(place):
        raise InputError(
            f"{workload.name} {quoted(place)} is not valid in the encoding of this locale: "
            "set LC_ALL=C.UTF-8, or rename it"
        )
    if not (isinstance(place, str) and place):
        raise InputError(
            f"{workload.name} must be file.py, file.py:function or module:function, found {quoted(place)}"
        )


def _read(name: str, arguments: list[str], known: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return what the command line gives, as text."""
    types = {_spelled(option): field.type for option, field in fields_of(name).items()}
    valued = {option for option, annotation in types.items() if plain_type(annotation) is not bool}
    switches = types.keys() - valued
    spellings = [*HELP_WORDS, *types, *(f"--no-{switch.removeprefix('--')}" for switch in switches)]
    words = _joined(arguments, valued, spellings)
    try:
        found, extra = _parser(name, known, shows_all="--help-all" in words).parse_known_args(words)
    except argparse.ArgumentError as error:
        names = (error.argument_name or "").split("/")
        if names[0] in valued:
            raise InputError(f"{names[0]} has no value: give {expected(types[names[0]])}") from None
        option, _, value = next(
            (pair for pair in (word.partition("=") for word in words) if pair[0] in names and pair[1]),
            (names[0], "", ""),
        )
        raise InputError(f"{option} takes no value, found {quoted(value)}") from None
    for word in extra:
        if word.startswith("-"):
            see = f"see autobatch {name} --help-all"
            raise InputError(unknown_option(word.partition("=")[0], spellings, otherwise=see))
    if extra:
        raise InputError(
            f"give one WORKLOAD, found {quoted(found.workload)} and {quoted(extra[0])}; "
            f"see autobatch {name} --help"
        )
    given = {option: value for option, value in vars(found).items() if value is not None}
    return {
        option: OptionValue(value, "WORKLOAD" if option == "workload" else _spelled(option))
        for option, value in given.items()
    }


def _joined(arguments: list[str], valued: Container[str], known: Container[str]) -> list[str]:
    """Spell options with dashes, and join them to a value that begins with one (``--study=-x``).

    argparse takes every word that begins with a dash for an option.
    """
    words: list[str] = []
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for word in arguments[:end]:
        option, equals, value = word.partition("=")
        option = option.replace("_", "-") if word.startswith("--") else option
        if words and words[-1] in valued and word.startswith("-") and option not in known:
            words[-1] = f"{words[-1]}={word}"
        else:
            words.append(option + equals + value if word.startswith("--") else word)
    return words + arguments[end:]


def _parser(name: str, known: Mapping[str, OptionValue], *, shows_all: bool) -> _Parser:
    """Build the parser of a command; its help shows the common options, or all of them."""
    fields = fields_of(name).values()
    required = {field.name for field in fields if name in field.about.required_by}
    needs = "".join(f" {_spelled(one.name)} {one.about.metavar}" for one in fields if one.name in required)
    parser = _Parser(
        usage=f"autobatch {name} [WORKLOAD]{needs} [options]",
        description=SUMMARIES[name],
        formatter_class=_formatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    groups = {title: parser.add_argument_group(title) for title in TITLES.values()}
    groups["batch"].add_argument(
        "workload",
        nargs="?",
        metavar="WORKLOAD",
        help=f"file.py or module:function. {_hint(known.get('workload'), 'demo')}",
    )
    for field in sorted(fields, key=lambda one: (one.name not in required, not one.about.common)):
        about = field.about
        hint = _hint(known.get(field.name), field.default, required=field.name in required)
        text = f"{about.text} {hint}".strip()
        groups[TITLES[field.section]].add_argument(
            _spelled(field.name),
            help=text.replace("%", "%%") if about.common or shows_all else argparse.SUPPRESS,
            **_keywords_of(field.type, about.metavar),
        )
    groups["output"].add_argument(*HELP_WORDS, action="help", help="Show the common options, or all of them.")
    return parser


def _keywords_of(annotation: Any, metavar: str) -> dict[str, Any]:
    """Return argparse's keywords for a switch, or for an option that takes one word or several."""
    if plain_type(annotation) is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(plain_type(annotation)) is list:
        return {"action": "extend", "nargs": "+", "metavar": metavar}
    return {"metavar": metavar or f"{{{','.join(choices_of(annotation))}}}"}


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(
        prog, max_help_position=HELP_COLUMN, width=shutil.get_terminal_size().columns
    )


def _hint(given: OptionValue | None, default: object, *, required: bool = False) -> str:
    """Return the end of an option's help: its value if none is given on the command line."""
    if given is not None:
        return f"(default: {_shown(given.value)}, from {printable(given.name)})"
    if required:
        return "(required)"
    is_shown = isinstance(default, str | int | float) and default is not False
    return f"(default: {default})" if is_shown else ""


def _shown(value: object) -> str:
    return printable(value, limit=LONGEST_VALUE) if isinstance(value, str) else quoted(value)


def _spelled(option: str) -> str:
    return f"--{option.replace('_', '-')}"
