"""The command line. It imports nothing heavy before a command runs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, NoReturn, cast

from autobatch.cli.output import (
    PARTS,
    SafeStream,
    output_of_run,
    print_error,
    raise_on_termination,
    report_failure,
    write_json,
    write_line,
)
from autobatch.core import __version__
from autobatch.core.errors import InputError
from autobatch.core.text import quoted

if TYPE_CHECKING:
    from autobatch.core.options import Options
    from autobatch.distributed.ranks import Ranks
    from autobatch.report.result import Estimates, Result


COMMANDS = {
    "fit": "probe, plan, tune and train; save the weights and a report",
    "plan": "find the largest micro-batch, and split the batch",
    "probe": "find the largest micro-batch that fits",
    "tune": "probe, plan, and measure which configuration is fastest",
    "estimate": "predict what fits on GPUs that need not be present",
    "init": "write a program to start from, and its options",
    "record": "record the memory of any program, for estimate --snapshot",
    "profiles": "hardware profiles: list, show NAME",
    "compare": "show what differs: compare RUN RUN",
    "doctor": "show devices, memory, versions, and what is missing",
}
HELP = f"""\
usage: autobatch COMMAND [WORKLOAD] [options]

Find the largest micro-batch that fits in memory, plan the accumulation that
gives exactly the batch you ask for, tune the configuration, and train.

commands:
{chr(10).join(f"  {name:<10} {text}" for name, text in COMMANDS.items())}

WORKLOAD is file.py, path/to/file.py:function or module:function. Without it:
`workload` in autobatch.toml or in [tool.autobatch] of pyproject.toml, else the
demo. probe, plan and fit also take a program as it is: -- COMMAND.

  autobatch fit --target-batch 1024
  autobatch fit train.py --target-batch 1024 --memory-budget 6GiB
  autobatch probe -- python train.py --batch_size={{}}   a program as it is
  autobatch COMMAND --help        the common options
  autobatch COMMAND --help-all    every option
  autobatch --version"""
QUESTIONS = {
    **dict.fromkeys(("-h", "--help", "help"), HELP),
    **dict.fromkeys(("-V", "--version"), f"autobatch {__version__}"),
}
"""First words that are no command, and their answers."""
SCRIPTED = ("fit", "plan", "probe")
"""Commands that take the words of a program after ``--``."""


def main() -> NoReturn:
    """Run a command and exit with its code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started this process
            null = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(null, True)
            stream = os.fdopen(null, "w")
        # A character that the terminal cannot show must not end a run.
        stream.reconfigure(errors="replace")
        setattr(sys, name, SafeStream(stream))
    words = sys.argv[1:]
    del sys.argv[1:]  # a file with a workload may parse them at its import
    code = run(words)
    failure = cast("SafeStream", sys.stdout).failure
    if failure is not None:
        print_error(f"standard output: {failure.strerror}")
        code = code or 1
    if os.environ.get("WORLD_SIZE", "1") != "1":
        end_now(code)  # a rank must not wait at exit for connections to ranks that are gone
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C from here on would only print what it interrupts
    # The collections at the end of a process with torch take half a second, and free what ends anyway.
    atexit.register(gc.freeze)
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """End this process without the handlers that run at an exit, but delete what they would."""
    # Only here, and in `run`: the help does not need it.
    import shutil

    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # its folder, which loader workers have used
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code. A failure is one line and, if it is unexpected, a log."""
    name, *words = arguments or ["--help"]
    try:
        return run_command(name, words)
    except BaseException as error:
        return report_failure(error, shlex.join(["autobatch", *arguments]), "--verbose" in arguments)


def run_command(name: str, words: list[str]) -> int:
    """Run a command and return its exit code.

    Raises:
        InputError: there is no such command, its words are wrong, or what they name is.
        AutobatchError: see `autobatch.api.pipeline.run_command`.
    """
    if name in QUESTIONS:
        return write_line(QUESTIONS[name])
    if name not in COMMANDS:
        import difflib

        is_file = name.endswith(".py")
        near = [f"fit {name}"] if is_file else difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see autobatch --help"
        raise InputError(f"there is no command {quoted(name)}; {hint}")
    from autobatch.cli.parser import HelpAsked
    from autobatch.core.options import COMMANDS as OPENING

    has_mark = "--" in words
    is_program = name in SCRIPTED and has_mark
    try:
        if name in OPENING and not is_program:
            if has_mark or any("{}" in word for word in words):
                raise InputError(
                    "probe, plan and fit take a program as it is, and need -- before it: autobatch probe -- "
                    "python train.py --batch_size={}"
                )
            return run_workload(name, words)
        # Only here: the help of these commands needs neither.
        from autobatch.cli import commands
        from autobatch.distributed.launch import refuse_ranks

        refuse_ranks(os.environ, name)
        if is_program:
            return commands.run_program(name, words)
        return commands.record(words) if name == "record" else commands.run_command(name, words)
    except HelpAsked as asked:
        return write_line(str(asked))


def run_workload(name: str, words: list[str]) -> int:
    """Run a command that opens a workload, and return its exit code; see `run_command`."""
    from autobatch.cli.parser import parse

    workload, options = parse(name, COMMANDS[name], words)
    line = shlex.join(["autobatch", name, *words])
    with raise_on_termination():
        ranks = join_ranks(name, words, options)
        if ranks.world > 1 and options.ranks is None:
            from autobatch.distributed.launch import torchrun_of

            line = f"{torchrun_of(os.environ)} -m {line}"
        try:
            result = show_result(workload, options, ranks, line)
            if options.json and ranks.rank == 0:
                write_json(result.to_json(*PARTS.get(name, ())))
            ranks.close()
        except BaseException as error:
            return report_failure(error, line, options.verbose, ranks)
        return 0


def join_ranks(name: str, words: list[str], options: Options) -> Ranks:
    """Return the ranks that run a command together. If this process is to start them, it ends with them."""
    from autobatch.distributed.launch import open_ranks, refuse_ranks, start_ranks
    from autobatch.distributed.ranks import Ranks, read_launch

    if name == "estimate":
        refuse_ranks(os.environ, name)
        return Ranks()
    count = options.ranks or 1
    if count > 1 and read_launch(os.environ) is None:
        ended = start_ranks([name, *words], count)
        if ended.line is not None:
            print_error(ended.line)
        end_now(ended.code)  # what torch keeps for its ranks must not hold up the end
    if name == "plan" and "RANK" not in os.environ:
        return Ranks()  # WORLD_SIZE alone asks for a plan for another launcher
    return open_ranks(os.environ, options.collective_timeout)


def show_result(workload: str | None, options: Options, ranks: Ranks, line: str) -> Result | Estimates:
    """Run a command that opens a workload on this rank, and return its result, which rank 0 has shown."""
    from autobatch.rehearsal.process import ChildProcess, import_torch, may_copy
    from autobatch.report.terminal import Terminal
    from autobatch.workload.user_code import check_reference, is_named_model

    predicts = options.command == "estimate"
    if workload is not None and not options.snapshot and not (predicts and is_named_model(workload)):
        check_reference(workload)  # before the seconds that torch takes to import
    # Threads of a group of ranks do not survive a copy. A resume may need no child.
    is_copy = ranks.world == 1 and may_copy(options.device) and not options.resume
    child = ChildProcess(is_copy=is_copy)
    with contextlib.ExitStack() as held:
        held.enter_context(output_of_run(as_json=options.json))
        terminal = held.enter_context(Terminal(sys.stdout, quiet=options.quiet or ranks.rank > 0))
        terminal.begin(", ".join(options.snapshot) or workload, predicts=predicts)
        terminal.doing("importing torch")
        if not (predicts or is_copy or options.resume):
            held.enter_context(child)  # it imports torch while this process does
        import_torch()
        from autobatch.api.pipeline import run_command, run_estimate
        from autobatch.api.run import Run

        if predicts:
            terminal.doing("predicting what fits")
            estimates = run_estimate(workload, options)
            terminal.estimated(estimates)
            return estimates
        if is_copy:  # before anything that a copy does not survive
            held.enter_context(child)
        run = Run(
            workload=workload, options=options, progress=terminal, ranks=ranks, command=line, child=child
        )
        result = run_command(run)
        if ranks.rank == 0:
            terminal.finish(result)
        return result
