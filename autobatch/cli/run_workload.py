"""A command that opens a workload: its run, and its result as lines on a terminal or as JSON."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import TYPE_CHECKING, TextIO, cast

from autobatch.cli.output import SafeStream, reserve_stdout, undelivered_code

if TYPE_CHECKING:
    from autobatch.cli.failures import RunLog
    from autobatch.core.options import Options
    from autobatch.distributed.ranks import Ranks
    from autobatch.report.result import Estimates, Result

PARTS: dict[str, tuple[str, ...]] = {
    "fit": (),
    "plan": ("device", "probe", "plan", "profile", "report"),
    "probe": ("device", "probe"),
    "tune": ("device", "probe", "plan", "tuning", "profile", "report"),
    "estimate": (),
}
"""Parts of the JSON of a command; empty for all."""


def run_workload(name: str, workload: str | None, options: Options, log: RunLog, ranks: Ranks) -> int:
    """Run a command on this rank and return its exit code; rank 0 prints.

    Args:
        name: of the command.
        workload: its reference; None for the demo.
        options: of the command.
        log: learns the folder of the run.
        ranks: the processes that run the command together.
    """
    with reserve_stdout() if options.output.json else contextlib.nullcontext():
        stream = SafeStream(sys.stderr if options.output.json else sys.stdout)
        if ranks.rank:
            _run_silently(workload, options, log, ranks)
            return 0
        result = _result_of(name, workload, options, log, stream=stream, ranks=ranks)
    if options.output.json:
        import msgspec

        try:
            sys.stdout.write(msgspec.json.encode(result.to_json(*PARTS[name])).decode() + "\n")
            sys.stdout.flush()
        except OSError as error:
            return undelivered_code(error)
    return 0 if stream.failure is None else undelivered_code(stream.failure)


def _result_of(
    name: str, workload: str | None, options: Options, log: RunLog, *, stream: SafeStream, ranks: Ranks
) -> Result | Estimates:
    from autobatch.report.terminal import Terminal
    from autobatch.setup.child import ChildProcess, may_copy
    from autobatch.workload.reference import check_reference

    with contextlib.ExitStack() as held:
        if workload is not None:
            check_reference(workload)  # before the seconds that torch takes to import
        is_resume = name == "fit" and options.train.resume
        # Threads of a group of ranks do not survive a copy.
        is_copy = ranks.world == 1 and may_copy(options.device.device)
        child = None if is_resume or name == "estimate" else ChildProcess(is_copy=is_copy)
        if child is not None and not is_copy:
            # It imports torch while this process does.
            held.enter_context(child)
        terminal = held.enter_context(Terminal(cast("TextIO", stream), quiet=options.output.quiet))
        terminal.begin(workload, predicts=name == "estimate")
        terminal.doing("importing torch")
        gc.disable()  # collections while torch makes a million objects take a fifth of its import
        from autobatch.api.call import Call
        from autobatch.api.pipeline import run, run_estimate

        gc.freeze()
        gc.enable()

        if name == "estimate":
            terminal.doing("predicting what fits")
            estimates = run_estimate(workload, options, os.environ)
            terminal.estimated(estimates)
            return estimates
        if child is not None:
            held.enter_context(child)
        call = Call(
            workload=workload,
            options=options,
            progress=terminal,
            ranks=ranks,
            isolated=True,
            child=child,
            environ=os.environ,
            command=log.command,
            entered=log.enter,
        )
        result = run(call)
        terminal.finish(result)
    return result


def _run_silently(workload: str | None, options: Options, log: RunLog, ranks: Ranks) -> None:
    """Run a command on a rank that prints nothing."""
    from autobatch.api.call import Call
    from autobatch.api.pipeline import run

    run(
        Call(
            workload=workload,
            options=options,
            ranks=ranks,
            isolated=True,
            environ=os.environ,
            command=log.command,
            entered=log.enter,
        )
    )
