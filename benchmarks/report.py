"""What benchmarks share: options, the machine and the versions, tables, and the results."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autobatch.core.units import format_bytes

RESULTS = Path(__file__).parent / "results"


def arguments(about: str | None, /, **defaults: Any) -> argparse.Namespace:
    """Read the options of a benchmark from the command line.

    Args:
        about: its docstring, for the help.
        defaults: the options by name. A list offers its items, all of them by default. ``False`` is a flag,
            None an optional file, and ``Path`` a file that must be given.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=layout)
    for name, value in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if value is Path:
            parser.add_argument(name, type=Path)
        elif value is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(value, list):
            listed = f"of {', '.join(map(str, value))}; all by default"
            parser.add_argument(flag, nargs="*", choices=value, default=value, metavar="NAME", help=listed)
        else:
            kind = Path if value is None else type(value)
            parser.add_argument(flag, type=kind, default=value, help="default: %(default)s")
    return parser.parse_args()


def save(topic: str, table: str, **given: object) -> Path:
    """Write a table of this machine, below its hardware, versions, date and load.

    Args:
        topic: name of the file in `RESULTS`, which it replaces.
        table: in Markdown.
        given: the options of the benchmark.
    """
    from autobatch.device.host import cpu_name, host_memory

    versions = [f"Python {platform.python_version()}"]
    for name in ("torch-autobatch", "torch", "optuna"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    cores, memory = os.cpu_count(), format_bytes(host_memory().total_bytes)
    head = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}: {cpu_name()}, {cores} cores, {memory}"
    options = "".join(f"; {name} {value}" for name, value in given.items())
    text = f"{head}; load {os.getloadavg()[0]:.1f}; {', '.join(versions)}{options}.\n\n{table}"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{topic}.md"
    path.write_text(text, encoding="utf-8")
    return path


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
