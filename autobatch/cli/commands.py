"""The commands that run no workload. The help of each is its docstring."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from inspect import getdoc
from pathlib import Path
from typing import Any

import msgspec

from autobatch.cli.output import terminal_width, write_json, write_line
from autobatch.cli.parser import HELP_WORDS, read_words
from autobatch.core import __version__
from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.options import all_fields
from autobatch.core.records import SCHEMA
from autobatch.core.text import printable_lines, quoted
from autobatch.core.units import format_bytes
from autobatch.device.profiles import data_home, list_profiles, profile_file, read_profile

Answer = tuple[Any, str]
"""Answer of a command, as the object of ``--json`` and as text."""

PACKAGES = (
    *("torch", "nvidia-ml-py", "optuna", "numpy", "safetensors", "matplotlib"),
    *("tensorboard", "wandb", "mlflow"),
)
"""Distributions whose versions belong in a bug report."""
STARTED = {"train.py": "train.txt", "autobatch.toml": "autobatch.toml"}
"""Files of a new project, and what is in them."""


def run_command(name: str, words: list[str]) -> int:
    """Run a command, print its answer, and return the exit code.

    Raises:
        InputError: a word is wrong, or the run, the profile or the GPU that it names does not exist.
    """
    commands = {"init": init, "profiles": profiles, "compare": compare, "doctor": doctor}
    if not HELP_WORDS.isdisjoint(words):
        return write_line(getdoc(commands[name]) or "")
    switches, others = read_words(name, words, [all_fields()["json"], all_fields()["verbose"]])
    content, text = commands[name](others)
    return write_json(content) if switches.get("json") else write_line(printable_lines(text))


def init(words: list[str]) -> Answer:
    """Write a small program, train.py, and its options, autobatch.toml, to a folder.

    usage: autobatch init [DIR] [--json]

    There, autobatch fit trains it. Both are yours to change. (default: this folder)
    """
    if len(words) > 1:
        raise InputError(f"init takes one folder, found {len(words)}: {quoted(' '.join(words))}")
    folder = Path(*words)
    paths = [folder / name for name in STARTED]
    there = next((path for path in paths if path.exists()), None)
    if there is not None:
        raise InputError(f"{there} exists, and init overwrites nothing: name another folder, or move it away")
    for path in paths:
        template = files("autobatch.cli") / "templates" / STARTED[path.name]
        try:
            write_atomic(path, template.read_bytes())
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{path} cannot be written ({reason}): name another folder") from None
    enter = f"cd {shlex.quote(str(folder))} && " if words else ""
    text = f"wrote {' and '.join(map(str, paths))}. Try: {enter}autobatch fit"
    return {"files": [str(path) for path in paths]}, text


def profiles(words: list[str]) -> Answer:
    """List hardware profiles: the memory and other figures of GPUs, each with its source.

    usage: autobatch profiles [list | show NAME] [--json]

    profiles show NAME prints one, which can be the pattern for one of your own.
    """
    from autobatch.report.tables import aligned, folded

    match words or ["list"]:
        case ["list"]:
            known = list_profiles()
            rows = [["NAME", "MEMORY", "CC", "GPU"]]
            for profile in known:
                capability = ".".join(map(str, profile.compute_capability))
                measured = " (measured)" if profile.total.measured else ""
                title = f"{profile.title}{measured}"
                rows.append([profile.name, format_bytes(profile.total_bytes), capability, title])
            content = {"schema": SCHEMA, "autobatch": __version__, "profiles": known}
            remark, width = "CC: compute capability. Sources: profiles show NAME", terminal_width()
            return content, "\n".join([*aligned(rows, width), *folded(remark, width, 0)])
        case ["show", name]:
            file = profile_file(name)
            return read_profile(file), file.read_text(encoding="utf-8").rstrip()
    raise InputError(f"write profiles list or profiles show NAME, found {quoted(' '.join(words))}")


def compare(words: list[str]) -> Answer:
    """Compare runs: print what differs between them, what each planned and what it reached.

    usage: autobatch compare RUN RUN … [--json]

    RUN is the folder of a run, as fit makes it in runs.
    """
    from autobatch.report.result import load_run
    from autobatch.report.tables import aligned, compare_runs

    folders = [Path(word) for word in words]
    if len({folder.resolve() for folder in folders}) < 2:
        raise InputError("compare takes two or more different runs: give RUN RUN")
    given, reached = compare_runs([load_run(folder) for folder in folders])
    differing = {name: cells for name, cells in given.items() if len(set(cells)) > 1}
    content = {
        "runs": {
            str(folder): {name: cells[at] for name, cells in (given | reached).items()}
            for at, folder in enumerate(folders)
        },
        "differs": list(differing),
    }
    gap = [""] * len(folders)
    rows = [["", *map(str, folders)], ["differs" if differing else "nothing given differs", *gap]]
    rows += [[name, *cells] for name, cells in differing.items()]
    rows += [["planned and reached", *gap], *([name, *cells] for name, cells in reached.items())]
    return content, "\n".join(aligned(rows, terminal_width()))


def doctor(words: list[str]) -> Answer:
    """Show the devices, the memory and who holds it, versions, and what is missing.

    usage: autobatch doctor [--json]
    """
    if words:
        raise InputError(f"doctor takes no arguments, found {quoted(' '.join(words))}")
    import torch

    from autobatch.device.cuda import visible_gpus
    from autobatch.device.host import cpu_name, host_memory
    from autobatch.device.nvml import read_gpus
    from autobatch.report.tables import folded

    shown, has_cuda, built_for = read_gpus(), torch.cuda.is_available(), torch.version.cuda
    missing = []
    if built_for is None:
        missing.append("CUDA: torch was built without it, so training runs on the CPU or on sim:PROFILE")
    elif not has_cuda:
        missing.append("a CUDA GPU that torch can use: check the driver and CUDA_VISIBLE_DEVICES")
    nvml: dict[str, Any] = {"available": not isinstance(shown, str)}
    if isinstance(shown, str):
        nvml["reason"] = shown
        missing.append("NVML: the processes that hold memory of a GPU are unknown")
    else:
        nvml["gpus"] = msgspec.to_builtins(shown)
    installed = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    findings = {
        "host": {"name": cpu_name(), **host_memory()._asdict(), "cores": os.cpu_count()},
        "cuda": {"available": has_cuda, "built_for": built_for, "gpus": visible_gpus()},
        "nvml": nvml,
        "versions": {"python": platform.python_version(), **installed},
        "home": str(data_home(os.environ)),
        "missing": missing,
    }
    lines = [part for line in _outline(findings) for part in folded(line, terminal_width(), 15)]
    return {"schema": SCHEMA, "autobatch": __version__, **findings}, "\n".join(lines)


def _outline(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a line for each value that is known, below the name of what it belongs to."""
    for name, value in found.items():
        label = f"{indent}{name.removesuffix('_bytes').replace('_', ' ')}"
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from (label, *_outline(item, f"{indent}  "))
            elif item is not None:
                yield f"{label:<14} {format_bytes(item) if name.endswith('_bytes') else item}"
