"""Options from config files and environment variables, and their precedence.

Later sources win: the user's ``config.toml``, ``[tool.autobatch]`` of ``pyproject.toml``, ``autobatch.toml``
(which replaces the table of ``pyproject.toml``), ``AUTOBATCH_…`` variables, the command line. Every value
keeps the name of its source, so that an error can say where to correct it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autobatch.core.check_options import unknown_option
from autobatch.core.errors import InputError
from autobatch.core.files import read_toml
from autobatch.core.options import all_fields
from autobatch.core.text import quoted

PREFIX = "AUTOBATCH_"
NO_OPTIONS = frozenset({"AUTOBATCH_HOME"})
"""Variables that begin with the prefix but are no options."""
EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}
"""Options that exclude each other; the one from the later source wins."""


class OptionValue(NamedTuple):
    """Value of an option, with its source."""

    value: Any
    name: str
    """Name of the option in its source: ``--steps``, ``AUTOBATCH_STEPS``, ``steps in autobatch.toml``."""


def configured(folder: Path, user_config: Path | None, environ: Mapping[str, str]) -> dict[str, OptionValue]:
    """Return the options in config files and environment variables, including ``workload``.

    Args:
        folder: the working directory.
        user_config: the user's ``config.toml``; None to skip it.
        environ: the environment variables.

    Raises:
        InputError: a file is not TOML, or an option does not exist.
    """
    return layered(*file_layers(folder, user_config), environment_values(environ))


def layered(*layers: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Merge layers of values; later layers win."""
    values: dict[str, OptionValue] = {}
    for layer in layers:
        for name in layer:
            if EXCLUSIVE.get(name) not in layer:
                values.pop(EXCLUSIVE.get(name, ""), None)
        values |= layer
    return values


def file_layers(folder: Path, user_config: Path | None) -> list[dict[str, OptionValue]]:
    """Read the options in config files, the lowest precedence first.

    Raises:
        InputError: a file is not TOML, or an option does not exist.
    """
    project = folder / "autobatch.toml"
    files = [user_config, project if project.is_file() else folder / "pyproject.toml"]
    return [_read_layer(path) for path in files if path is not None and path.is_file()]


def environment_values(environ: Mapping[str, str]) -> dict[str, OptionValue]:
    """Read the options in ``AUTOBATCH_…`` variables (``AUTOBATCH_MEMORY_BUDGET=6GiB``).

    An empty variable counts as not set.

    Raises:
        InputError: a variable has the prefix, but no option has its name.
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
    table: Any = read_toml(path)
    for name in ("tool", "autobatch") if path.name == "pyproject.toml" else ():
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} must be a table, found {quoted(table)}")
    values: dict[str, OptionValue] = {}
    spelled: dict[str, str] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _all_names():
            raise InputError(f"{path}: {unknown_option(name, _all_names())}")
        if name in spelled:
            raise InputError(f"{path} has both {spelled[name]} and {key}, which are one option: keep one")
        spelled[name] = key
        values[name] = OptionValue(value, f"{name} in {path}")
    return values


def _all_names() -> set[str]:
    return {"workload", *all_fields()}
