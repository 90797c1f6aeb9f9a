"""The commands that run no workload, such as ``profiles`` and ``doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autobatch.cli.output import write_json, write_line
from autobatch.cli.record import RECORD_HELP
from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.records import SCHEMA
from autobatch.core.text import printable_lines, quoted
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__
from autobatch.device.profiles import (
    data_home,
    format_profile,
    list_profiles,
    load_profile,
)


class Answer(NamedTuple):
    """Answer of a command, as the object of ``--json`` and as text."""

    content: Any
    text: str


RUNS = "runs"
"""Folder of the runs whose folder was not asked for, as ``NAME/DATE``."""

PACKAGES = (
    *("torch", "nvidia-ml-py", "optuna", "numpy", "safetensors", "matplotlib"),
    *("tensorboard", "wandb", "mlflow"),
)
"""Distributions whose versions belong in a bug report."""
STARTED = {"train.py": "train.txt", "autobatch.toml": "autobatch.toml"}
"""Files of a new project, and what is in them."""
HELP = {
    "init": """\
usage: autobatch init [DIR] [--json]

Write a small program, train.py, and its options, autobatch.toml, to a folder.
There, autobatch fit trains it. Both are yours to change. (default: this folder)""",
    "profiles": """\
usage: autobatch profiles [list | show NAME] [--json]

Hardware profiles: the memory and other figures of GPUs, each with its source.

  list         List the profiles. (default)
  show NAME    Print a profile, which can be the pattern for one of your own.""",
    "compare": """\
usage: autobatch compare [RUN RUN …] [--json]

Print runs side by side: the options, versions and hardware that differ, plan,
speed, memory and held-out figures. RUN is the folder of a run. (default: the
newest two runs of the workload that ran last, in runs, where fit puts them)""",
    "doctor": """\
usage: autobatch doctor [--json]

Show the devices, the memory and who holds it, versions, and what is missing.""",
    "completion": """\
usage: autobatch completion bash | zsh | fish [--json]

Print the script with which a shell completes commands, options and choices.

autobatch completion bash > ~/.local/share/bash-completion/completions/autobatch
autobatch completion zsh > ~/.zfunc/_autobatch       # a folder of $fpath
autobatch completion fish > ~/.config/fish/completions/autobatch.fish""",
}
"""Help of each command."""


def run_command(name: str, arguments: list[str]) -> int:
    """Run a command, print its answer, and return the exit code.

    Raises:
        InputError: a word is wrong, or the run, the profile or the GPU that it names does not exist.
    """
    if not {"-h", "--help", "--help-all"}.isdisjoint(arguments):
        return write_line(HELP[name])
    options = [word for word in arguments if word.startswith("-")]
    unknown = [word for word in options if word not in ("--json", "--verbose")]
    if unknown:
        raise InputError(f"there is no option {unknown[0]}; see autobatch {name} --help")
    commands = {
        "init": _init,
        "profiles": _profiles,
        "compare": _compare,
        "doctor": _doctor,
        "completion": _completion,
    }
    found = commands[name]([word for word in arguments if not word.startswith("-")])
    if "--json" in options:
        return write_json(found.content)
    return write_line(printable_lines(found.text))


def _init(words: list[str]) -> Answer:
    """Run ``autobatch init [DIR]``: write a program and its options, and overwrite nothing."""
    if len(words) > 1:
        raise InputError(f"init takes one folder, found {len(words)}: {quoted(' '.join(words))}")
    folder = Path(*words)
    paths = [folder / name for name in STARTED]
    there = next((path for path in paths if path.exists()), None)
    if there is not None:
        raise InputError(f"{there} exists, and init overwrites nothing: name another folder, or move it away")
    for path in paths:
        template = files("autobatch.cli") / "templates" / STARTED[path.name]
        write_atomic(path, template.read_bytes())
    enter = f"cd {shlex.quote(str(folder))} && " if words else ""
    text = f"wrote {' and '.join(map(str, paths))}. Try: {enter}autobatch fit"
    return Answer({"files": [str(path) for path in paths]}, text)


def _profiles(words: list[str]) -> Answer:
    """Run ``autobatch profiles [list | show NAME]``."""
    match words or ["list"]:
        case ["list"]:
            return _list_profiles()
        case ["show", name]:
            profile = load_profile(name)
            return Answer(profile, format_profile(profile).rstrip())
    raise InputError(f"write profiles list or profiles show NAME, found {quoted(' '.join(words))}")


def _list_profiles() -> Answer:
    profiles = list_profiles()
    lines = [f"{'NAME':<16} {'MEMORY':>9}  {'CC':<5} GPU"]
    for profile in profiles:
        capability = ".".join(map(str, profile.compute_capability))
        measured = " (measured)" if profile.total.measured else ""
        lines.append(
            f"{profile.name:<16} {format_bytes(profile.total_bytes):>9}  {capability:<5} "
            f"{profile.title}{measured}"
        )
    lines.append(
        "CC: compute capability. Figures without (measured) are from public sources: profiles show NAME"
    )
    content = {"schema": SCHEMA, "autobatch": __version__, "profiles": profiles}
    return Answer(content, "\n".join(lines))


def _compare(words: list[str]) -> Answer:
    """Run ``autobatch compare [RUN RUN …]``: show what differs between runs, and what they reached."""
    from autobatch.report.compare import compare_runs, newest_two
    from autobatch.report.result import load_run
    from autobatch.report.tables import aligned

    folders = [Path(word) for word in words] or newest_two(Path(RUNS))
    if len({folder.resolve() for folder in folders}) < 2:
        raise InputError(f"compare takes two or more different runs, found {folders[0]} only: give RUN RUN")
    found = compare_runs([load_run(folder) for folder in folders])
    figures = found.given | found.reached
    content = {
        "runs": {
            str(folder): {name: cells[at] for name, cells in figures.items()}
            for at, folder in enumerate(folders)
        },
        "differs": list(found.differing),
    }
    gap = [""] * len(folders)
    rows = [["", *map(str, folders)], ["differs" if found.differing else "nothing given differs", *gap]]
    rows += [[name, *cells] for name, cells in found.differing.items()]
    rows += [["planned and reached", *gap], *([name, *cells] for name, cells in found.reached.items())]
    return Answer(content, "\n".join(aligned(rows)))


def _doctor(words: list[str]) -> Answer:
    """Run ``autobatch doctor``: show this machine, and what is missing and why."""
    if words:
        raise InputError(f"doctor takes no arguments, found {' '.join(words)}")
    findings = examine()
    content = {"schema": SCHEMA, "autobatch": __version__, **findings}
    return Answer(content, "\n".join(doctor_lines(findings)))


def _completion(words: list[str]) -> Answer:
    """Run ``autobatch completion SHELL``: print the script with which a shell completes the commands."""
    from autobatch.cli.parser import SHELLS, completion_script

    if len(words) != 1 or words[0] not in SHELLS:
        shells = "completion bash, completion zsh or completion fish"
        found = quoted(" ".join(words)) if words else "none"
        raise InputError(f"completion takes the name of a shell, found {found}: write {shells}")
    profiles = list_profiles()
    script = completion_script(words[0], [one.name for one in profiles], HELP | {"record": RECORD_HELP})
    return Answer({"shell": words[0], "script": script}, script)


def examine() -> dict[str, Any]:
    """Examine the machine: host, GPUs, NVML, versions, and what is missing."""
    import torch

    from autobatch.device.cuda import visible_gpus
    from autobatch.device.host import cpu_name, host_memory
    from autobatch.device.nvml import NvmlAbsent, read_gpus

    gpus, shown = visible_gpus(), read_gpus()
    missing = []
    if torch.version.cuda is None:
        missing.append("CUDA: torch was built without it, so training runs on the CPU or on sim:PROFILE")
    elif not torch.cuda.is_available():
        missing.append("a CUDA GPU that torch can use: check the driver and CUDA_VISIBLE_DEVICES")
    nvml: dict[str, Any] = {"available": not isinstance(shown, NvmlAbsent)}
    if isinstance(shown, NvmlAbsent):
        nvml["reason"] = shown.reason
        missing.append("NVML: the processes that hold memory of a GPU are unknown")
    else:
        nvml["gpus"] = msgspec.to_builtins(shown)
    return {
        "host": {"name": cpu_name(), **host_memory()._asdict(), "cores": os.cpu_count()},
        "cuda": {
            "available": torch.cuda.is_available(),
            "built_for": torch.version.cuda,
            "gpus": gpus,
        },
        "nvml": nvml,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "home": str(data_home(os.environ)),
        "missing": missing,
    }


def doctor_lines(findings: dict[str, Any]) -> list[str]:
    """Return the findings as lines of text."""
    host, cuda, nvml = findings["host"], findings["cuda"], findings["nvml"]
    build = f"torch built for CUDA {cuda['built_for']}" if cuda["built_for"] else "torch built without CUDA"
    lines = [
        f"host     {host['name']}, {host['cores']} cores",
        f"memory   {format_bytes(host['available_bytes'])} available of {format_bytes(host['total_bytes'])}"
        f" ({host['source']})",
        f"cuda     {build}",
    ]
    lines += [
        f"         cuda:{gpu['index']} {gpu['name']}, {format_bytes(gpu['total_bytes'])}, "
        f"cc {gpu['capability']}"
        for gpu in cuda["gpus"]
    ]
    lines.append(f"nvml     {'available' if nvml['available'] else 'not available: ' + nvml['reason']}")
    for gpu in nvml.get("gpus", ()):
        lines.append(f"         {gpu['name']}: {format_bytes(gpu['free_bytes'])} free")
        for holder in gpu["holders"]:
            who = f"process {holder['pid']} {holder['name'] or ''}"
            lines.append(f"           {who} {format_bytes(holder['used_bytes'])}")
    versions = [f"{name} {version}" for name, version in findings["versions"].items() if version]
    lines.append(f"versions {', '.join(versions)}")
    lines.append(f"home     {findings['home']}")
    lines += [f"missing  {line}" for line in findings["missing"]]
    return lines


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
