"""The commands that open no workload, and probe, plan and fit of a program as it is, after ``--``.

The help of the others is their docstring.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from autobatch.cli.output import (
    PARTS,
    new_log,
    output_of_run,
    raise_on_termination,
    terminal_width,
    write_json,
    write_line,
)
from autobatch.cli.parser import options_of, read_words
from autobatch.core import __version__
from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.options import AtLeastOne, Option, Seconds, all_fields
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
PROGRAM_OPTIONS = (
    *("target_batch", "memory_budget", "max_micro_batch", "micro_batch_multiple"),
    *("json", "quiet", "verbose"),
)
"""Options that concern a program besides ``--seconds``; it has flags of its own for all others."""
PROGRAM_HELP = """\
usage: autobatch probe [options] -- COMMAND
       autobatch plan --target-batch N [options] -- COMMAND
       autobatch fit --target-batch N [options] -- COMMAND

Find the largest micro-batch at which a program runs, as it is. In COMMAND, {}
stands for the micro-batch, {steps} for the accumulation steps of a rank, and
{total_steps} for those of all ranks. plan prints the command, filled in, and
fit becomes it.

OPTIONS
-h, --help shows the common options, --help-all all of them.

  autobatch probe -- python train.py --batch_size={}
  autobatch fit --target-batch 480 -- \\
    python train.py --batch_size={} --gradient_accumulation_steps={steps}"""
SECONDS = Option("Longest time of a run, which takes three steps.", 300, type=Seconds)
RECORDING = {
    "out": Option(
        "The snapshot; other ranks write beside it. (required)", type=Annotated[str, Meta(title="FILE")]
    ),
    "steps": Option("Write it after N steps of an optimizer.", type=AtLeastOne),
    "seconds": Option("Write it after this time.", type=Seconds),
}
"""Options of ``record``."""
PLACES = {"{}": "the size of a micro-batch, {}", "steps}": "the accumulation steps, {steps}"}
"""What the words of a command have a place for, a probe's only for the first."""


def run_command(name: str, words: list[str]) -> int:
    """Run a command, print its answer, and return the exit code.

    Raises:
        InputError: a word is wrong, or the run, the profile or the GPU that it names does not exist.
    """
    commands = {"init": init, "profiles": profiles, "compare": compare, "doctor": doctor}
    options = {option: all_fields()[option] for option in ("json", "verbose")}
    switches, others = read_words(name, getdoc(commands[name]) or "", words, options)
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
    enter = f"cd {shlex.quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
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
            rows += [[of.name, format_bytes(of.total_bytes), of.capability, of.title] for of in known]
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
    from autobatch.device.host import cpu_name, host_memory, read_gpus
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
        "home": str(data_home()),
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


def run_program(name: str, words: list[str]) -> int:
    """Run ``autobatch NAME … -- COMMAND``, and return the exit code. ``fit`` becomes the command.

    Raises:
        HelpAsked: a word asks for the help.
        InputError: a word is wrong, or the command takes no optimizer step.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    at = words.index("--")
    command = words[at + 1 :]
    known = {option: all_fields()[option] for option in PROGRAM_OPTIONS} | {"seconds": SECONDS}
    given, others = read_words(f"{name} -- COMMAND", PROGRAM_HELP, words[:at], known)
    if others:
        raise InputError(f"{name} takes a WORKLOAD or a command after --, found both: {quoted(others[0])}")
    seconds = given.pop("seconds", SECONDS.default)
    _, options = options_of(name, given)
    for mark in ("{}",) if name == "probe" else PLACES:
        if not any(mark in word for word in command):
            raise InputError(
                f"the command has no place for {PLACES[mark]}, found {shlex.join(command) or 'no command'}; "
                f"autobatch {name} --help -- shows an example"
            )
    if options.json and name == "fit":
        raise InputError("fit runs the command, whose standard output is its own: use plan --json")
    from autobatch.integrations.script import Runner, describe_gpu, fill, find_limit
    from autobatch.report.terminal import LABEL, Terminal

    log = new_log("-command")
    filled: list[str] = []
    with (
        output_of_run(as_json=options.json),
        raise_on_termination(),
        Terminal(sys.stdout, quiet=options.quiet) as terminal,
    ):
        terminal.begin(shlex.join(command))
        terminal.doing("reading the GPU")
        device = describe_gpu(options.memory_budget)
        terminal.opened(device)
        terminal.note(
            "the command runs a few times, up to its third optimizer step. What it writes (checkpoints, "
            f"logs, trackers), it writes in these runs, too. Its output is in {log}"
        )
        runner = Runner(command, device, seconds, log, options.verbose, terminal)
        result = find_limit(runner, options, home=data_home())
        terminal.note("this holds for the first steps: longer samples, evaluation and saving come later")
        if name != "probe":
            terminal.note(
                "not known here: for the gradient of the whole batch, the command must divide its loss by "
                "the number of micro-batches, and the loss must be a mean over samples"
            )
        terminal.finish(result)
        if (plan := result.plan) is not None:
            filled = fill(command, plan.micro_batch, plan.accumulation_steps, plan.world_size)
            write_line(f"{'run':<{LABEL}}{shlex.join(filled)}")
    if name == "fit":
        become(filled, os.environ)
    if options.json:
        write_json(result.to_json(*PARTS[name]) | ({"command": filled} if filled else {}))
    return 0


def record(words: list[str]) -> int:
    """Run a command as it is, and write the memory of its GPU, with the lines that took it.

    usage: autobatch record --out FILE [--steps N] [--seconds S] -- COMMAND

    OPTIONS

    Without --steps and --seconds it is written when the command ends, also by Ctrl-C, and
    in any case when memory runs out. The command goes on then. It keeps its terminal and
    exit code. Then ask what would fit: autobatch estimate --snapshot FILE

      autobatch record --out b8.pickle --steps 3 -- python train.py --batch_size=8
    """
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    given, others = read_words("record", getdoc(record) or "", words[:at], RECORDING)
    if others or not command or "out" not in given:
        raise InputError(
            "record takes --out FILE, and a command after --, as in autobatch record --out b8.pickle -- "
            f"python train.py; found {shlex.join(words) or 'neither'}"
        )
    out = Path(given["out"]).absolute()
    if not out.parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no folder {out.parent}")
    from autobatch.integrations.recorder.autobatch_recorder import recorded

    sys.stderr.write("autobatch: a process that uses a GPU says here when it has written its memory\n")
    return become(command, recorded(**given | {"out": str(out), "since": time.time()}))


def become(words: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command.

    Raises:
        InputError: it cannot be started.
    """
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        raise InputError(f"{words[0]} cannot be started: {error.strerror or error}") from error
