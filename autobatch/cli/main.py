"""The command line: the only module that prints or exits. It imports nothing heavy before a command runs."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from autobatch.core.text import encodable, one_line, printable_lines, quoted
from autobatch.core.version import __version__

if TYPE_CHECKING:
    from autobatch.api.pipeline import RunContext
    from autobatch.cli.failures import RunLog
    from autobatch.cli.output import SafeStream
    from autobatch.core.options import EstimateOptions, FitOptions, Options
    from autobatch.distributed.group import Group
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
  profiles   hardware profiles: list, show NAME, save NAME
  report     write the report of a run again: report [RUN], else the newest
  compare    show runs side by side: compare RUN RUN
  doctor     show devices, memory, versions, and what is missing

WORKLOAD is file.py, path/to/file.py:function or module:function. Without it:
`workload` in autobatch.toml or in [tool.autobatch] of pyproject.toml, else the
demo.

  autobatch fit --target-batch 1024
  autobatch fit train.py --target-batch 1024 --memory-budget 6GiB
  autobatch COMMAND --help        the common options
  autobatch COMMAND --help-all    every option
  autobatch --version
"""
RUNNING = ("fit", "plan", "probe", "tune", "estimate")
OTHER = ("profiles", "doctor", "report", "compare")
OVER_RANKS = ("fit", "plan")
"""Commands that several processes may run."""
PARTS: dict[str, tuple[str, ...]] = {
    "fit": (),
    "plan": ("device", "probe", "plan", "profile", "report"),
    "probe": ("device", "probe"),
    "tune": ("device", "probe", "plan", "tuning", "profile", "report"),
    "estimate": (),
}
"""Parts of the JSON of a command; empty for all."""


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
        code = _undelivered(error)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # A rank must not wait at exit for connections to ranks that are gone.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"autobatch {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in RUNNING + OTHER:
        kind = "option" if name.startswith("-") else "command"
        near = difflib.get_close_matches(name, RUNNING + OTHER, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(RUNNING + OTHER)}"
        _print_error(f"there is no {kind} {quoted(name)}; {hint}")
        return 2
    return _guarded(name, rest)


def _guarded(name: str, arguments: list[str]) -> int:
    """Run a command; turn an exception into one line, an exit code and, if it is unexpected, a log."""
    from autobatch.cli.failures import RunLog, raise_on_termination
    from autobatch.distributed.launch import read_launch
    from autobatch.distributed.ranks import Alone, open_ranks, refuse_ranks

    log = RunLog(_home, shlex.join(["autobatch", name, *arguments]))
    verbose = "--verbose" in arguments
    ranks: Alone | Group | None = None
    try:
        if name not in OVER_RANKS:
            refuse_ranks(os.environ, name)
        if name != "fit":
            ranks = Alone()
        if name in OTHER:
            return _run_other(name, arguments)
        from autobatch.cli.parser import parse

        try:
            workload, options = parse(name, arguments, folder=Path.cwd(), environ=os.environ)
        except SystemExit:
            return 0  # the help was printed
        except OSError as error:  # the help could not be printed
            return _undelivered(error)
        verbose = options.verbose
        count = cast("FitOptions", options).ranks if name == "fit" else None
        with raise_on_termination():
            if count is not None and count > 1 and read_launch(os.environ) is None:
                return _start_ranks([name, *arguments], count)
            ranks = ranks or open_ranks(os.environ)
            if ranks.world > 1 and count is None:
                per_host = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world))
                log.command = f"torchrun --nproc-per-node {per_host} -m {log.command}"
            code = _run_workload(name, workload, options, log, ranks)
            ranks.close()
            return code
    except BaseException as error:
        return _complain(error, log, ranks, verbose=verbose)


def _start_ranks(words: list[str], count: int) -> int:
    """Run a command in several ranks; rank 0 prints, and what a signal ended is told here."""
    from autobatch.distributed.start import start_ranks

    ended = start_ranks(words, count, os.environ)
    if ended.killed is not None:
        rank, name = ended.killed
        cause = ": the system may be out of memory" if name == "SIGKILL" else ""
        _print_error(f"rank {rank} was ended by {name}{cause}; --resume continues from the newest checkpoint")
    return ended.code


def _home() -> Path:
    from autobatch.device.profiles import data_home

    return data_home(os.environ)


def _run_other(name: str, arguments: list[str]) -> int:
    from autobatch.cli.commands import compare, doctor, profiles, report
    from autobatch.cli.output import SafeStream

    stream = SafeStream(sys.stdout)
    # JSON escapes control characters by its own rules.
    show = str if "--json" in arguments else printable_lines
    code = {"doctor": doctor, "profiles": profiles, "report": report, "compare": compare}[name](
        arguments, lambda text: print(show(text), file=cast("TextIO", stream))
    )
    stream.flush()
    return code if stream.failure is None else _undelivered(stream.failure)


def _run_workload(name: str, workload: str | None, options: Options, log: RunLog, ranks: Ranks) -> int:
    from autobatch.cli.output import SafeStream, reserve_stdout

    with reserve_stdout() if options.json else contextlib.nullcontext():
        stream = SafeStream(sys.stderr if options.json else sys.stdout)
        if ranks.rank:
            _run_silently(name, workload, options, log, ranks)
            return 0
        result = _result_of(name, workload, options, log, stream=stream, ranks=ranks)
    if options.json:
        import msgspec

        try:
            sys.stdout.write(msgspec.json.encode(result.to_json(*PARTS[name])).decode() + "\n")
            sys.stdout.flush()
        except OSError as error:
            return _undelivered(error)
    return 0 if stream.failure is None else _undelivered(stream.failure)


def _result_of(
    name: str, workload: str | None, options: Options, log: RunLog, *, stream: SafeStream, ranks: Ranks
) -> Result | Estimates:
    from autobatch.probing.spare import spare_child
    from autobatch.report.terminal import Terminal
    from autobatch.workload.reference import check_reference

    with contextlib.ExitStack() as held:
        if workload is not None:
            check_reference(workload)  # before the seconds that torch takes to import
        # It imports torch while this process does.
        is_resume = name == "fit" and cast("FitOptions", options).resume
        spare = None if is_resume or name == "estimate" else held.enter_context(spare_child())
        terminal = held.enter_context(Terminal(cast("TextIO", stream), quiet=options.quiet))
        terminal.begin(workload, predicts=name == "estimate")
        terminal.doing("importing torch")
        from autobatch.api.pipeline import RunContext, run_estimate

        if name == "estimate":
            terminal.doing("predicting what fits")
            estimates = run_estimate(workload, cast("EstimateOptions", options), os.environ)
            terminal.estimated(estimates)
            return estimates
        context = RunContext(
            progress=terminal,
            ranks=ranks,
            isolated=True,
            spare=spare,
            environ=os.environ,
            command=log.command,
            entered=log.enter,
        )
        result = _runner(name)(workload, options, context)
        terminal.finish(result)
    return result


def _runner(name: str) -> Callable[[Any, Any, RunContext], Result]:
    """Return the function of a command that runs a workload."""
    from autobatch.api.fit import run_fit
    from autobatch.api.pipeline import run_plan, run_probe, run_tune

    functions: dict[str, Callable[[Any, Any, RunContext], Result]] = {
        "fit": run_fit,
        "plan": run_plan,
        "probe": run_probe,
        "tune": run_tune,
    }
    return functions[name]


def _run_silently(name: str, workload: str | None, options: Options, log: RunLog, ranks: Ranks) -> None:
    """Run a command on a rank that prints nothing, and writes a log into the folder of the run."""
    from autobatch.api.pipeline import RunContext
    from autobatch.cli.rank_log import RankLog

    progress = RankLog(ranks.rank)

    def enter(folder: Path) -> None:
        log.enter(folder)
        progress.enter(folder)

    context = RunContext(
        progress=progress,
        ranks=ranks,
        isolated=True,
        environ=os.environ,
        command=log.command,
        entered=enter,
    )
    _runner(name)(workload, options, context)


def _complain(error: BaseException, log: RunLog, ranks: Ranks | None, *, verbose: bool) -> int:
    """Print one line, unless another rank has done so, and return the exit code."""
    import traceback

    from autobatch.cli.failures import describe_failure
    from autobatch.distributed.ranks import fail_before_meeting

    complaint = describe_failure(error, folder=log.folder)
    if ranks is None:
        is_first, earlier = fail_before_meeting(os.environ, complaint.line), None
    else:
        earlier = ranks.fail(complaint.line, complaint.exit_code)
        is_first = earlier is None
    if not is_first:
        return complaint.exit_code if earlier is None else earlier
    where = ""
    if complaint.logged:
        path = log.write(error)
        where = f"; full traceback: {path}" if path else "; for the traceback add --verbose"
    _print_error(complaint.line + where)
    if verbose:
        print(printable_lines("".join(traceback.format_exception(error))), file=sys.stderr)
    return complaint.exit_code


def _print_error(line: str) -> None:
    """Print one line, red on a terminal with colours."""
    text = encodable(f"autobatch: {one_line(line)}", sys.stderr.encoding)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, highlight=False).print(Text(text, style="red"), soft_wrap=True)
        return
    print(text, file=sys.stderr)


def _undelivered(error: OSError) -> int:
    """Return the exit code after output could not be written: 0 if the reader closed the pipe."""
    with contextlib.suppress(OSError, ValueError):  # captured output has no descriptor
        # Python must not try to write the rest of the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    _print_error(f"cannot write to standard output: {error.strerror or error}")
    return 1


if __name__ == "__main__":
    main()
