"""The commands ``probe``, ``plan`` and ``fit`` for a program of its own, whose words stand after ``--``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from autobatch.cli.output import (
    SafeStream,
    raise_on_termination,
    reserve_stdout,
    undelivered_code,
    write_json,
    write_line,
)
from autobatch.cli.parser import parse
from autobatch.cli.record import become, whole_number
from autobatch.core.errors import InputError
from autobatch.core.progress import Broadcast
from autobatch.core.text import quoted
from autobatch.device.profiles import data_home
from autobatch.integrations.script import Runner, describe_gpu, fill, find_limit
from autobatch.report.terminal import LABEL, Terminal

OPTIONS = (
    *("--target-batch", "--memory-budget", "--max-micro-batch", "--micro-batch-multiple"),
    *("--json", "--quiet", "--verbose"),
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

  --target-batch N        Samples per optimizer step, exactly. (plan, fit: required)
  --memory-budget SIZE    Memory that the allocator may hold, for example 6GiB or 80%.
  --max-micro-batch N     Largest micro-batch to try.
  --micro-batch-multiple N  Micro-batches are multiples of N.
  --seconds S             Time for three optimizer steps of a run. (default: 300)
  --json                  Print one JSON object to stdout, all else to stderr.
  --quiet                 Print the result, but no progress.
  --verbose               Also show what the command prints.

  autobatch probe -- python train.py --batch_size={}
  autobatch fit --target-batch 480 -- python train.py --batch_size={} --accumulate={steps}
"""
SECONDS = 300
"""Default time for the first steps of a run."""
PARTS = {"probe": ("device", "probe", "profile"), "plan": ("device", "probe", "plan", "profile")}
"""Parts of the JSON of a command; ``fit`` prints none, as standard output is the program's."""


def run_script(name: str, arguments: list[str]) -> int:
    """Run ``autobatch NAME … -- COMMAND``, and return the exit code. ``fit`` becomes the command.

    Raises:
        InputError: a word is wrong, or the command takes no optimizer step.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    at = arguments.index("--")
    own, command = arguments[:at], arguments[at + 1 :]
    if not {"-h", "--help", "--help-all"}.isdisjoint(own):
        return write_line(HELP)
    words, seconds = _own_words(name, own)
    workload, options = parse(name, words, folder=Path.cwd(), environ=os.environ)
    if workload in words:
        raise InputError(f"{name} takes a WORKLOAD or a command after --, found both: {quoted(workload)}")
    plans, as_json = name != "probe", options.json
    for is_missing, place, example in (
        (not any("{}" in word for word in command), "{} for the size of a micro-batch", "--batch_size={}"),
        (
            plans and not any("steps}" in word for word in command),
            "{steps} for the micro-batches of a step",
            "--gradient_accumulation_steps={steps}",
        ),
    ):
        if is_missing:
            raise InputError(
                f"no word of the command has a {place}: {shlex.join(command)}. Write for example {example}"
            )
    if as_json and name == "fit":
        raise InputError("fit runs the command, whose standard output is its own: use plan --json")
    home = data_home(os.environ)
    log = home / "logs" / f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d-%H%M%S}-{os.getpid()}-command.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    stream = SafeStream(sys.stderr if as_json else sys.stdout)
    with (
        reserve_stdout() if as_json else contextlib.nullcontext(),
        raise_on_termination(),
        Terminal(cast("TextIO", stream), quiet=options.quiet) as terminal,
    ):
        terminal.begin(shlex.join(command))
        progress = Broadcast([terminal])
        progress.doing("reading the GPU")
        device = describe_gpu(options.memory_budget)
        progress.opened(device)
        progress.note(
            "the command runs a few times, up to its third optimizer step. What it writes (checkpoints, "
            f"logs, trackers), it writes in these runs, too. Its output is in {log}"
        )
        echo = _echo if options.verbose else None
        runner = Runner(command, device, seconds, log, echo, progress)
        result = find_limit(runner, options, home=home)
        progress.note("this holds for the first steps: longer samples, evaluation and saving come later")
        if plans:
            progress.note(
                "not known here: for the gradient of the whole batch, the command must divide its loss by "
                "the number of micro-batches, and the loss must be a mean over samples"
            )
        terminal.finish(result)
        plan = result.plan
        words = fill(command, plan.micro_batch, plan.accumulation_steps, plan.world_size) if plan else []
        if words:
            stream.write(f"{'run':<{LABEL}}{shlex.join(words)}\n")
    if as_json:
        return write_json(result.to_json(*PARTS[name]) | ({"command": words} if words else {}))
    if name == "fit":
        become(words)
    return 0 if stream.failure is None else undelivered_code(stream.failure)


def _own_words(name: str, arguments: Sequence[str]) -> tuple[list[str], int]:
    """Return the words without ``--seconds``, and its value.

    Raises:
        InputError: a word is no option of a command for programs, or the value is no number of seconds.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--seconds", default=str(SECONDS))
    try:
        given, words = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error.argument_name} has no value; see autobatch {name} --help --") from None
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("-") and option not in OPTIONS:
            raise InputError(
                f"{name} -- COMMAND does not take {quoted(option)}, which may be a flag of the command. It "
                f"takes {', '.join((*OPTIONS, '--seconds'))}"
            )
    return words, whole_number("--seconds", given.seconds)


def _echo(text: bytes) -> None:
    """Show what the command prints."""
    sys.stderr.write(text.decode(errors="replace"))
    sys.stderr.flush()
