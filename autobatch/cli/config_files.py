"""Where the values of options come from besides the command line, and which of them wins.

Later places win: the user's ``config.toml``, ``[tool.autobatch]`` of ``pyproject.toml``, ``autobatch.toml``
(which replaces the table of ``pyproject.toml``), ``AUTOBATCH_…`` variables, the command line. Every value
keeps the name of its place, so that a complaint can say where to mend it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.option_types import unknown_option
from autobatch.core.options import COMMANDS

PREFIX = "AUTOBATCH_"


NO_OPTIONS = frozenset({"AUTOBATCH_HOME"})
"""Variables that start like an option's and are none."""


EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}
"""Of two options that exclude each other, the one from the later place wins."""


class OptionValue(NamedTuple):
    """A value that somebody gave."""

    value: Any
    name: str
    """What the option is called there: ``--steps``, ``AUTOBATCH_STEPS``, ``steps in autobatch.toml``."""


def configured(folder: Path, user_config: Path | None, environ: Mapping[str, str]) -> dict[str, OptionValue]:
    """The options that stand in config files and variables, ``workload`` among them.

    Args:
        folder: the working directory.
        user_config: the user's own ``config.toml``.
        environ: the variables.

    Raises:
        InputError: a file is no TOML, or an option does not exist.
    """
    return layered(*file_layers(folder, user_config), environment_values(environ))


def layered(*layers: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Lay values over each other; later ones win."""
    values: dict[str, OptionValue] = {}
    for layer in layers:
        for name in layer:
            if EXCLUSIVE.get(name) not in layer:
                values.pop(EXCLUSIVE.get(name, ""), None)
        values |= layer
    return values


def file_layers(folder: Path, user_config: Path | None) -> list[dict[str, OptionValue]]:
    """Read the options that stand in config files, earliest place first.

    Raises:
        InputError: a file is no TOML, or has an option that does not exist.
    """
    project = folder / "autobatch.toml"
    files = [user_config, project if project.is_file() else folder / "pyproject.toml"]
    return [_read_layer(path) for path in files if path is not None and path.is_file()]


def environment_values(environ: Mapping[str, str]) -> dict[str, OptionValue]:
    """Read the options that stand in ``AUTOBATCH_…`` variables (``AUTOBATCH_MEMORY_BUDGET=6GiB``).

    A variable that is empty counts as not set.

    Raises:
        InputError: a variable starts like an option, and there is no such option.
    """
    names = {PREFIX + name.upper(): name for name in _all_names()}
    values: dict[str, OptionValue] = {}
    for key, value in environ.items():
        if not key.startswith(PREFIX) or key in NO_OPTIONS or not value:
            continue
        if key not in names:
            raise InputError(f"the environment: {unknown_option(key, names)}")
        values[names[key]] = OptionValue(value.split() if names[key] == "profile" else value, key)
    return values


def _read_layer(path: Path) -> dict[str, OptionValue]:
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from None
    for name in ("tool", "autobatch") if path.name == "pyproject.toml" else ():
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} must be a table, found {table!r}")
    values: dict[str, OptionValue] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _all_names():
            raise InputError(f"{path}: {unknown_option(name, _all_names())}")
        values[name] = OptionValue(value, f"{name} in {path}")
    return values


def _all_names() -> set[str]:
    return {"workload"} | {name for kind in COMMANDS.values() for name in kind.__struct_fields__}
