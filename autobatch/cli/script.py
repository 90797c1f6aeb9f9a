"""The commands for a program as it is, whose words stand after ``--``: probe, plan, fit, and record."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from inspect import getdoc
from pathlib import Path
from typing import Annotated, NoReturn

from msgspec import Meta

from autobatch.cli.output import (
    PARTS,
    new_log,
    output_of_run,
    raise_on_termination,
    write_json,
    write_line,
)
from autobatch.cli.parser import options_of, read_words
from autobatch.core.errors import InputError
from autobatch.core.options import Option, all_fields
from autobatch.core.text import quoted

OPTIONS = (
    *("target_batch", "memory_budget", "max_micro_batch", "micro_batch_multiple"),
    *("json", "quiet", "verbose"),
)
"""Options that concern a program besides ``--seconds``; it has flags of its own for all others."""
HELP = """\
usage: autobatch probe [options] -- COMMAND
       autobatch plan --target-batch N [options] -- COMMAND
       autobatch fit --target-batch N [options] -- COMMAND

Find the largest micro-batch at which a command runs, as it is. It has {} in place of
the size of a micro-batch, and {steps} of the micro-batches of a rank in an optimizer
step, or {total_steps} of those of all ranks. plan prints the command, filled in, and
fit becomes it.

OPTIONS
-h, --help shows the common options, --help-all all of them.

  autobatch probe -- python train.py --batch_size={}
  autobatch fit --target-batch 480 -- python train.py --batch_size={} --accumulate={steps}"""
Count = Annotated[int, Meta(ge=1, le=10**9, description="a whole number of 1 or more")]
Time = Annotated[int, Meta(ge=1, le=10**9, title="S", description="a whole number of 1 or more")]
"""Seconds; a timer takes no more."""
File = Annotated[str, Meta(title="FILE", description="a file")]
SECONDS = Option("Time for three optimizer steps of a run.", 300, type=Time)
RECORDING = {
    "out": Option("The snapshot; other ranks write beside it. (required)", type=File),
    "steps": Option("Write it after N steps of an optimizer.", type=Count),
    "seconds": Option("Write it after this time.", type=Time),
}
"""Options of ``record``."""
PLACES = {"{}": "the size of a micro-batch", "steps}": "the micro-batches of a step, {steps}"}
"""What the words of a command have a place for, a probe's only for the first."""


def run_script(name: str, words: list[str]) -> int:
    """Run ``autobatch NAME … -- COMMAND``, and return the exit code. ``fit`` becomes the command.

    Raises:
        HelpAsked: a word asks for the help.
        InputError: a word is wrong, or the command takes no optimizer step.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    at = words.index("--")
    command = words[at + 1 :]
    known = {option: all_fields()[option] for option in OPTIONS} | {"seconds": SECONDS}
    given, others = read_words(name, HELP, words[:at], known)
    if others:
        raise InputError(f"{name} takes a WORKLOAD or a command after --, found both: {quoted(others[0])}")
    seconds = given.pop("seconds", SECONDS.default)
    _, options = options_of(name, given)
    for mark in ("{}",) if name == "probe" else PLACES:
        if not any(mark in word for word in command):
            raise InputError(
                f"no word of the command has a place for {PLACES[mark]}: {shlex.join(command)}. "
                f"autobatch {name} --help -- shows an example"
            )
    if options.json and name == "fit":
        raise InputError("fit runs the command, whose standard output is its own: use plan --json")
    from autobatch.device.profiles import data_home
    from autobatch.integrations.script import Runner, describe_gpu, fill, find_limit
    from autobatch.report.terminal import LABEL, Terminal

    log = new_log("-command")
    log.parent.mkdir(parents=True, exist_ok=True)
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
        result = find_limit(runner, options, home=data_home(os.environ))
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
