"""The command line of a command: its words to a workload and checked options, and its help.

tyro splits the words and lays out the help. Every value stays text until `autobatch.core.options` checks it,
so that a bad one reads the same wherever it was given.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import io
import itertools
import re
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from autobatch.cli.config_files import OptionValue, configured, layered
from autobatch.core.errors import InputError
from autobatch.core.options import COMMANDS, Options, expected, options_from

DOES = {
    "fit": "Probe, plan, tune and train; save what fits, the weights and the report.",
    "plan": "Find the largest micro-batch that fits, and split the batch you ask for exactly.",
    "probe": "Find the largest micro-batch that fits.",
    "tune": "Probe and plan, then measure what is left to choose, with Optuna.",
    "estimate": "Predict the largest micro-batch, for hardware that need not be here.",
}


METAVARS = {
    "device": "DEVICE",
    "memory_budget": "SIZE",
    "time_limit": "SECONDS",
    "timeout": "SECONDS",
    "storage": "URL",
    "study": "NAME",
    "out": "DIR",
    "profile": "NAME",
}
"""What an option takes, where its type does not say it."""


def parse(
    name: str, arguments: list[str], *, folder: Path, environ: Mapping[str, str]
) -> tuple[str | None, Options]:
    """The workload and the options of a command, from the files, the variables and the command line.

    Args:
        name: the command.
        arguments: the words after it.
        folder: the working directory.
        environ: the variables.

    Raises:
        InputError: what was asked for cannot be; one line.
        SystemExit: help was asked for, and printed.
    """
    import platformdirs

    kind = COMMANDS[name]
    user_config = Path(platformdirs.user_config_dir("autobatch")) / "config.toml"
    known = configured(folder, user_config, environ)
    _refuse_unknown(arguments, kind)
    given = layered(known, _read(name, arguments, known))
    workload = given.pop("workload", OptionValue(None, ""))
    if workload.value is not None and not (workload.value and isinstance(workload.value, str)):
        raise InputError(
            f"{workload.name} must be module:function or path/to/file.py:function, found {workload.value!r}"
        )
    mine = {option: one for option, one in given.items() if option in kind.__struct_fields__}
    names = {option: _spelled(option) for option in kind.__struct_fields__}
    names |= {option: one.name for option, one in mine.items()}
    return workload.value, options_from(
        kind, {option: one.value for option, one in mine.items()}, names=names
    )


def _read(name: str, arguments: list[str], known: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """What stands on the command line alone, as text."""
    import tyro

    kind = COMMANDS[name]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found: Any = tyro.cli(
                _form(kind, known, with_help=not {"-h", "--help"}.isdisjoint(arguments)),
                prog=f"autobatch {name}",
                description=DOES[name],
                args=arguments,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        why = _first_paragraph(complaint.getvalue())
        extra = why.removeprefix("Unrecognized options: ")
        if extra != why:
            why = f"there is one WORKLOAD, and {extra!r} is one word too many"
        raise InputError(f"{why}; see autobatch {name} --help") from None
    # A switch has no third value for "not given": whether it was is read from the words.
    mentioned = {_option_of(word) for word in arguments}
    values = {option: _flat(getattr(found, option)) for option in kind.__struct_fields__}
    given = {
        option: OptionValue(value, _spelled(option))
        for option, value in values.items()
        if value is not None and (not isinstance(value, bool) or option in mentioned)
    }
    return given if found.workload is None else given | {"workload": OptionValue(found.workload, "WORKLOAD")}


def _flat(value: Any) -> Any:
    """What was given; of an option that takes several, the words of all its places (``-p a b -p c``)."""
    return list(itertools.chain(*value)) or None if isinstance(value, tuple) else value


def _form(kind: type[Options], known: Mapping[str, OptionValue], *, with_help: bool) -> type:
    """A dataclass whose fields are the words that a command takes, for tyro to read."""
    import tyro

    docs = _docs(kind) if with_help else {}
    fields_of = {one.name: one for one in msgspec.structs.fields(kind)}
    fields: list[tuple[str, Any, Any]] = []
    positional = tyro.conf.arg(
        metavar="[WORKLOAD]",
        help="module:function, or path/to/file.py:function.",
        help_behavior_hint=_hint(known.get("workload"), "the embedded demo"),
    )
    fields.append(("workload", Annotated[tyro.conf.Positional[str | None], positional], None))  # type: ignore[misc]
    types = get_type_hints(kind, include_extras=True)
    # What is needed first, then what only this command takes, then what all of them take.
    order = [option for base in kind.__mro__ for option in inspect.get_annotations(base) if option in types]
    for option in sorted(order, key=lambda name: not fields_of[name].required):
        annotation = types[option]
        described = tyro.conf.arg(
            metavar=None if annotation is bool else _metavar(option, annotation),
            help=docs.get(option, ""),
            help_behavior_hint=_hint(
                known.get(option), fields_of[option].default, required=fields_of[option].required
            ),
        )
        if annotation is bool:
            fields.append((option, Annotated[bool, described], False))
        elif get_origin(annotation) is list:
            several = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, described]
            fields.append((option, several, ()))
        else:
            fields.append((option, Annotated[str | None, described], None))
    return make_dataclass(kind.__name__, fields)


def _hint(given: OptionValue | None, default: object, *, required: bool = False) -> str:
    """What stands after the help of an option: where its value would come from."""
    if given is not None:
        return f"(default: {given.value}, from {given.name})"
    if required:
        return "(required)"
    shown = isinstance(default, str | int | float) and default is not False
    return f"(default: {default})" if shown else ""


def _metavar(option: str, annotation: Any) -> str:
    """What an option takes: ``INT``, ``SIZE``, ``{none,linear,sqrt}``."""
    if option in METAVARS:
        return METAVARS[option]
    if isinstance(annotation, UnionType) or get_origin(annotation) in (Union, Annotated):
        return _metavar(option, get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    return {int: "INT", float: "FLOAT", str: "TEXT"}[annotation]


def _docs(kind: type[Options]) -> dict[str, str]:
    """The docstrings under the fields of a structure: Python keeps them only in the source."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, Options):
            continue
        try:
            body = ast.parse(inspect.getsource(base)).body[0]
        except (OSError, SyntaxError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs


def _refuse_unknown(arguments: list[str], kind: type[Options]) -> None:
    """Say what is wrong with an option before tyro sees the words: its own words are many lines."""
    types = get_type_hints(kind, include_extras=True)
    switches = {_spelled(option) for option, annotation in types.items() if annotation is bool}
    taking = {_spelled(option): annotation for option, annotation in types.items()}
    known = ["--help", "-h", *taking, *(f"--no-{switch[2:]}" for switch in switches)]
    waiting: str | None = None
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if waiting is not None and option not in known:
            waiting = None
            continue
        if waiting is not None:
            break
        if not word.startswith("-"):
            continue
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            raise InputError(
                f"there is no option {option}; {f'did you mean {near[0]}?' if near else 'see --help'}"
            )
        takes_value = option in taking and option not in switches
        if equals and not takes_value:
            raise InputError(f"{option} takes no value, found {value!r}")
        waiting = option if takes_value and not equals else None
    if waiting is not None:
        raise InputError(f"{waiting} is given no value: it must be {expected(taking[waiting])}")


def _option_of(word: str) -> str:
    """The name of the option that a word gives: ``resume`` for ``--resume`` and ``--no-resume``."""
    return word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")


def _spelled(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _first_paragraph(box: str) -> str:
    """The message inside tyro's box, as one line: without its title, its frame and its advice."""
    lines = (" ".join(re.sub(r"[│|╭╮╰╯─]|-{3,}", " ", line).split()) for line in box.splitlines())
    title, *texts = [line for line in lines if line] or [""]
    message = itertools.takewhile(lambda line: not line.startswith("For full helptext"), texts)
    return " ".join(message).rstrip(".") or title
