"""The commands that run no workload: ``doctor``, ``profiles`` and ``report``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autobatch.cli.doctor import doctor_lines, examine
from autobatch.core.errors import InputError
from autobatch.core.records import SCHEMA
from autobatch.core.text import error_text, quoted
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__
from autobatch.device.profiles import (
    Figure,
    HardwareProfile,
    data_home,
    format_profile,
    list_profiles,
    load_profile,
    save_profile,
)

Printer = Callable[[str], None]
"""Function that prints a text and a line end."""


LEAST_COMPARED = 2
"""Fewest runs to show side by side."""
RUNS = "runs"
"""Folder of the runs."""

HELP = {
    "profiles": """\
usage: autobatch profiles [list | show NAME | save NAME] [--json]

Hardware profiles: the memory and other figures of GPUs, each with its source.

  list         List the shipped and the saved profiles. (default)
  show NAME    Print a profile.
  save NAME    Save a profile of the GPU of this machine.""",
    "report": """\
usage: autobatch report [RUN] [--json]

Write the report of a run again. RUN is its folder, for example runs/NAME/DATE,
or one above it, of which the newest run is taken. (default: runs)""",
    "compare": """\
usage: autobatch compare RUN RUN [RUN …] [--json]

Print runs side by side: plan, speed, memory and held-out figures. Write
compare.html to the folder of the last one, with their losses over each other.
RUN is a folder of a run, or one above it, of which the newest run is taken.""",
    "doctor": """\
usage: autobatch doctor [--json]

Show the devices, the memory and who holds it, versions, and what is missing.""",
}
"""Help of each command."""


def profiles(arguments: list[str], write: Printer) -> int:
    """Run ``autobatch profiles [list | show NAME | save NAME]``.

    Raises:
        InputError: the action or the profile is unknown, or there is no GPU to save.
    """
    words, as_json = _words("profiles", arguments, write)
    if words is None:
        return 0
    home, found = data_home(os.environ), quoted(" ".join(words))
    match words or ["list"]:
        case ["list"]:
            _list_profiles(home, write, as_json=as_json)
        case ["show", name]:
            profile = load_profile(name, user_dir=home)
            write(_json(profile) if as_json else format_profile(profile).rstrip())
        case ["save", name]:
            path = save_profile(this_gpu(name), user_dir=home)
            write(_json({"profile": str(path)}) if as_json else f"saved {path}")
        case ["list" | "show" | "save", *_]:
            raise InputError(f"write profiles list, profiles show NAME or profiles save NAME, found {found}")
        case _:
            raise InputError(f"there is no action {found} of profiles: use list, show NAME or save NAME")
    return 0


def report(arguments: list[str], write: Printer) -> int:
    """Run ``autobatch report [RUN]``: write the report of a run again.

    Raises:
        InputError: the run does not exist.
    """
    words, as_json = _words("report", arguments, write)
    if words is None:
        return 0
    if len(words) > 1:
        raise InputError(
            f"report takes the folder of one run, found {len(words)}: write report runs/NAME/DATE"
        )
    from autobatch.report.page import write_report
    from autobatch.report.result import find_run, load_run

    folder = find_run(Path(words[0] if words else RUNS))
    run = load_run(folder)
    try:
        path = write_report(folder / "report.html", run)
    except (ArithmeticError, ValueError) as error:
        raise InputError(
            f"the report of {folder} cannot be written, a figure of the run is out of range: "
            f"{error_text(error)}"
        ) from error
    write(_json({"report": str(path)}) if as_json else str(path))
    return 0


def compare(arguments: list[str], write: Printer) -> int:
    """Run ``autobatch compare RUN RUN …``: print the runs side by side, and write a page with their losses.

    Raises:
        InputError: there are fewer than two runs, or one does not exist.
    """
    words, as_json = _words("compare", arguments, write)
    if words is None:
        return 0
    if len(words) < LEAST_COMPARED:
        raise InputError(f"compare takes the folders of two or more runs, found {len(words)}")
    from autobatch.report.compare import comparison_table, write_comparison
    from autobatch.report.result import find_run, load_run

    folders = [find_run(Path(word)) for word in words]
    if len({folder.resolve() for folder in folders}) < LEAST_COMPARED:
        raise InputError(f"compare takes two or more different runs, found {folders[0]} only")
    runs = [load_run(folder) for folder in folders]
    names = [str(folder) for folder in folders]
    path = write_comparison(folders[-1] / "compare.html", runs, names)
    table = comparison_table(runs, names)
    if as_json:
        columns = [dict(zip([row[0] for row in table.rows], column, strict=True))
                   for column in list(zip(*table.rows, strict=True))[1:]]  # fmt: skip
        write(_json({"runs": dict(zip(names, columns, strict=True)), "page": str(path)}))
        return 0
    rows = [table.head, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.head))]
    for row in rows:
        write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    write(f"\nlosses over each other: {path}")
    return 0


def doctor(arguments: list[str], write: Printer) -> int:
    """Run ``autobatch doctor``: show this machine, and what is missing and why."""
    words, as_json = _words("doctor", arguments, write)
    if words is None:
        return 0
    if words:
        raise InputError(f"doctor takes no arguments, found {' '.join(words)}")
    findings = examine()
    if as_json:
        write(_json({"schema": SCHEMA, "autobatch": __version__, **findings}))
        return 0
    for line in doctor_lines(findings):
        write(line)
    return 0


def this_gpu(name: str) -> HardwareProfile:
    """Return a profile of the first GPU of this machine, with the figures that can be read from it.

    Raises:
        InputError: there is no GPU, or the name is invalid.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "profiles save needs a CUDA GPU, and torch finds none: run it on the machine with the GPU"
        )
    properties = torch.cuda.get_device_properties(0)
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    total = Figure(
        value=properties.total_memory,
        unit="B",
        source=f"torch {torch.__version__} get_device_properties",
        date=day,
        measured=True,
    )
    content = {
        "schema": 1,
        "name": name,
        "title": properties.name,
        "vendor": "NVIDIA",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "device_names": [properties.name],
        "total": total,
    }
    try:
        return msgspec.convert(msgspec.to_builtins(content), HardwareProfile)
    except msgspec.ValidationError as error:
        raise InputError(f"{name!r} is not a valid profile name ({error}): write it like rtx-4090") from None


def _words(name: str, arguments: list[str], write: Printer) -> tuple[list[str] | None, bool]:
    """Return the words without options, None if help was printed, and whether JSON is asked for."""
    if not {"-h", "--help", "--help-all"}.isdisjoint(arguments):
        write(HELP[name])
        return None, False
    unknown = [word for word in arguments if word.startswith("-") and word not in ("--json", "--verbose")]
    if unknown:
        raise InputError(f"there is no option {unknown[0]}; see autobatch {name} --help")
    return [word for word in arguments if not word.startswith("-")], "--json" in arguments


def _list_profiles(home: Path, write: Printer, *, as_json: bool) -> None:
    listing = list_profiles(user_dir=home)
    if as_json:
        write(_json({"schema": SCHEMA, "autobatch": __version__, "profiles": listing.profiles}))
        return
    write(f"{'NAME':<16} {'MEMORY':>9}  {'CC':<5} GPU")
    for profile in listing.profiles:
        capability = ".".join(map(str, profile.compute_capability))
        measured = " (measured)" if profile.total.measured else ""
        write(
            f"{profile.name:<16} {format_bytes(profile.total_bytes):>9}  {capability:<5} "
            f"{profile.title}{measured}"
        )
    write("CC: compute capability. Figures without (measured) are from public sources: profiles show NAME")
    for problem in listing.problems:
        write(f"skipped: {problem}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
