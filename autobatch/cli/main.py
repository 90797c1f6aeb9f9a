"""The command line. It imports nothing heavy before a command runs."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import gc
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO, cast

from autobatch.cli.output import (
    RunLog,
    SafeStream,
    describe_failure,
    print_error,
    raise_on_termination,
    reserve_stdout,
    undelivered_code,
    write_json,
)
from autobatch.core.progress import Broadcast
from autobatch.core.text import printable_lines, quoted
from autobatch.core.version import __version__

if TYPE_CHECKING:
    from autobatch.api.run import Run
    from autobatch.core.options import Options
    from autobatch.distributed.ranks import Ranks
    from autobatch.report.result import Estimates, Result


HELP = """\
usage: autobatch COMMAND [WORKLOAD] [options]

Find the largest micro-batch that fits in memory, plan the accumulation that
gives exactly the batch you ask for, tune the configuration, and train.

commands:
  fit        probe, plan, tune and train; save the weights and a report
  plan       find the largest micro-batch, and split the batch
  probe      find the largest micro-batch that fits
  tune       probe, plan, and measure which configuration is fastest
  estimate   predict what fits on GPUs that need not be present
  init       write a program to start from, and its options
  record     record the memory of any program, for estimate --snapshot
  profiles   hardware profiles: list, show NAME
  compare    show runs side by side: compare RUN RUN, else the newest two
  doctor     show devices, memory, versions, and what is missing
  completion print the completion of a shell: bash, zsh or fish

WORKLOAD is file.py, path/to/file.py:function or module:function. Without it:
`workload` in autobatch.toml or in [tool.autobatch] of pyproject.toml, else the
demo. probe, plan and fit also take a program as it is: -- COMMAND.

  autobatch fit --target-batch 1024
  autobatch fit train.py --target-batch 1024 --memory-budget 6GiB
  autobatch probe -- python train.py --batch_size={}   a program as it is
  autobatch COMMAND --help        the common options
  autobatch COMMAND --help-all    every option
  autobatch --version
"""
OVER_RANKS = ("fit", "plan", "probe", "tune")
"""Commands that several processes may run."""
SCRIPTED = ("fit", "plan", "probe")
"""Commands that take the words of a program after ``--``."""
RUNNING = (*OVER_RANKS, "estimate")
OTHER = ("init", "profiles", "doctor", "compare", "completion")
ALL = (*RUNNING, *OTHER, "record")
PARTS: dict[str, tuple[str, ...]] = {
    "plan": ("device", "probe", "plan", "profile", "report"),
    "probe": ("device", "probe"),
    "tune": ("device", "probe", "plan", "tuning", "profile", "report"),
}
"""Parts of the JSON of a command; other commands print all of them."""
COMMON_CODES = (2, 3, 130, 143)
"""Exit codes of failures that every rank has before the ranks meet: rank 0 alone reports them."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        # A character that the terminal cannot show must not end a run.
        getattr(sys, name).reconfigure(errors="replace")
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except OSError as error:
        code = undelivered_code(error)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        end_now(code)  # a rank must not wait at exit for connections to ranks that are gone
    # The collections at the end of a process with torch take half a second, and free what ends anyway.
    atexit.register(gc.freeze)
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """End this process without the handlers that run at an exit, but delete what they would."""
    sys.stdout.flush()
    sys.stderr.flush()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # its folder, which loader workers have used
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"autobatch {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in ALL:
        if name.startswith("-"):
            print_error(f"there is no option {quoted(name)} before a command; see autobatch --help")
            return 2
        near = difflib.get_close_matches(name, ALL, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(ALL)}"
        print_error(f"there is no command {quoted(name)}; {hint}")
        return 2
    return _guarded(name, rest)


def _guarded(name: str, arguments: list[str]) -> int:
    """Run a command; turn an exception into one line, an exit code and, if it is unexpected, a log."""
    from autobatch.distributed.launch import open_ranks, refuse_ranks, start_ranks
    from autobatch.distributed.ranks import Ranks, read_launch

    log = RunLog(shlex.join(["autobatch", name, *arguments]))
    verbose = "--verbose" in arguments
    ranks: Ranks | None = None
    try:
        is_program = name == "record" or (name in SCRIPTED and "--" in arguments)
        if is_program or name not in OVER_RANKS:
            refuse_ranks(os.environ, name)
            ranks = Ranks()
        if is_program:
            return _run_program(name, arguments)
        if name in OTHER:
            from autobatch.cli.commands import run_command

            return run_command(name, arguments)
        from autobatch.cli.parser import parse

        try:
            workload, options = parse(name, arguments, folder=Path.cwd(), environ=os.environ)
        except SystemExit:
            return 0  # the help was printed
        verbose = options.verbose
        count = max(options.rank_counts, default=None) if name in OVER_RANKS else None
        with raise_on_termination():
            if count is not None and count > 1 and read_launch(os.environ) is None:
                ended = start_ranks([name, *arguments], count)
                if ended.line is not None:
                    print_error(ended.line)
                end_now(ended.code)  # what torch keeps for its ranks must not hold up the end
            if name == "plan" and "RANK" not in os.environ:
                ranks = Ranks()  # WORLD_SIZE alone asks for a plan for another launcher
            ranks = ranks or open_ranks(os.environ)
            if ranks.world > 1 and count is None:
                per_host = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world))
                hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
                nodes = "" if hosts == "1" else f"--nnodes {hosts} "
                log.command = f"torchrun {nodes}--nproc-per-node {per_host} -m {log.command}"
            code = run_workload(Command(name, workload, options, log, ranks))
            ranks.close()
            return code
    except BaseException as error:
        return _report_failure(error, name, log, ranks, verbose=verbose)


def _run_program(name: str, arguments: list[str]) -> int:
    """Run a command whose words after ``--`` are another program's."""
    if name == "record":
        from autobatch.cli.record import run_record

        return run_record(arguments)
    from autobatch.cli.script import run_script

    return run_script(name, arguments)


class Command(NamedTuple):
    """A command that opens a workload, on one rank."""

    name: str
    workload: str | None
    """Reference of the workload; None for the demo."""
    options: Options
    log: RunLog
    """Learns the folder of the run."""
    ranks: Ranks
    """The processes that run the command together."""

    def run(self, **fields: Any) -> Run:
        """Return the run of the pipeline, which tries the workload in a child."""
        # Imported here: it imports torch.
        from autobatch.api.run import Run

        return Run(
            workload=self.workload,
            options=self.options,
            ranks=self.ranks,
            isolated=True,
            command=self.log.command,
            entered=self.log.enter,
            **fields,
        )


def run_workload(command: Command) -> int:
    """Run a command on this rank and return its exit code; rank 0 prints."""
    as_json = command.options.json
    with reserve_stdout() if as_json else contextlib.nullcontext():
        stream = SafeStream(sys.stderr if as_json else sys.stdout)
        if command.ranks.rank:
            from autobatch.api.pipeline import run_command

            run_command(command.run())
            return 0
        result = _result_of(command, stream)
    if as_json:
        return write_json(result.to_json(*PARTS.get(command.name, ())))
    return 0 if stream.failure is None else undelivered_code(stream.failure)


def _result_of(command: Command, stream: SafeStream) -> Result | Estimates:
    """Run a command and show its progress and its result."""
    from autobatch.rehearsal.process import ChildProcess, may_copy
    from autobatch.report.terminal import Terminal
    from autobatch.workload.reference import check_reference, is_named_model

    options, is_estimate = command.options, command.name == "estimate"
    snapshots = options.snapshot
    workload = None if snapshots else command.workload
    with contextlib.ExitStack() as opened:
        if workload is not None and not (is_estimate and is_named_model(workload)):
            check_reference(workload)  # before the seconds that torch takes to import
        # Threads of a group of ranks do not survive a copy.
        is_copy = command.ranks.world == 1 and may_copy(options.device)
        child = None if is_estimate or options.resume else ChildProcess(is_copy=is_copy)
        if child is not None and not is_copy:
            # It imports torch while this process does.
            opened.enter_context(child)
        terminal = opened.enter_context(Terminal(cast("TextIO", stream), quiet=options.quiet))
        terminal.begin(", ".join(snapshots) or workload, predicts=is_estimate)
        progress = Broadcast([terminal])
        progress.doing("importing torch")
        gc.disable()  # collections while torch makes a million objects take a fifth of its import
        from autobatch.api.pipeline import run_command, run_estimate
        from autobatch.step.optimizers import import_for_optimizers

        import_for_optimizers()
        gc.freeze()
        gc.enable()
        found: Result | Estimates
        if is_estimate:
            progress.doing("predicting what fits")
            found = run_estimate(workload, options)
            terminal.estimated(found)
        else:
            if child is not None and is_copy:
                opened.enter_context(child)
            found = run_command(command.run(progress=progress, child=child))
            terminal.finish(found)
    return found


def _report_failure(
    error: BaseException, name: str, log: RunLog, ranks: Ranks | None, *, verbose: bool
) -> int:
    """Print one line, unless another rank has done so, and return the exit code."""
    import traceback

    from autobatch.distributed.launch import fail_before_joining

    report = describe_failure(error, folder=log.folder, measures=name in OVER_RANKS)
    if ranks is None:
        is_common = report.exit_code in COMMON_CODES
        is_first, earlier = fail_before_joining(os.environ, report.line, is_common=is_common), None
    else:
        earlier = ranks.fail(report.line, report.exit_code)
        is_first = earlier is None
    if not is_first:
        return report.exit_code if earlier is None else earlier
    where = ""
    if report.is_logged:
        path = log.write(error)
        where = f"; full traceback: {path}" if path else "; for the traceback add --verbose"
    print_error(report.line + where)
    if verbose:
        print(printable_lines("".join(traceback.format_exception(error))), file=sys.stderr)
    return report.exit_code


if __name__ == "__main__":
    main()
