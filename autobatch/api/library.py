"""Library calls: probe, plan, estimate, tune and fit.

Each takes the options of the command of the same name as keywords, as text or as plain values. Its progress
goes to the terminal or notebook, to the log and to the user's own listener.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Unpack

from msgspec.structs import asdict
from rich.console import Console

from autobatch.api.pipeline import run_command, run_estimate
from autobatch.api.run import Run
from autobatch.core.errors import InputError
from autobatch.core.options import Keywords, options_from
from autobatch.core.progress import Progress
from autobatch.core.text import error_text, one_line
from autobatch.distributed.launch import open_ranks
from autobatch.report.result import Estimates, FitResult, PlanResult, ProbeResult, Result, TuneResult
from autobatch.report.terminal import Terminal
from autobatch.training.metrics import Sink, Until
from autobatch.workload.contract import kind_of
from autobatch.workload.user_code import WorkloadSource

ShowProgress = Progress | Literal["auto"] | bool
"""A listener, or whether to show the progress; ``auto`` shows it in terminals and notebooks."""


def probe(
    workload: WorkloadSource = None,
    *,
    progress: ShowProgress = "auto",
    **options: Unpack[Keywords],
) -> ProbeResult:
    """Find the largest micro-batch that fits.

    Args:
        workload: what to train, a function that returns it, or a reference to it; None for the demo.
        progress: ``auto`` to show it in terminals and notebooks, true, false, or a listener. If nothing
            shows them, remarks are warnings of ``logging.getLogger("autobatch")``.
        options: those of ``autobatch probe --help-all`` by their names, as text or plain values.

    Raises:
        InputError: an option, the device or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    result = _run("probe", options, workload, progress)
    return ProbeResult(**asdict(result.probe), device=result.device)


def plan(
    workload: WorkloadSource = None,
    *,
    target_batch: int,
    world_size: int | None = None,
    progress: ShowProgress = "auto",
    **options: Unpack[Keywords],
) -> PlanResult:
    """Probe, then plan the batch, to train in a loop of your own.

    It leaves room for two micro-batches, because such a loop keeps one in a variable until the next one is
    there. `fit` plans for its own loop, which frees a micro-batch after its forward pass.

    Under torchrun, call it on all ranks. If ``world_size`` is given, this process plans alone.

    Args:
        workload: as in `probe`.
        target_batch: samples per optimizer step, exactly.
        world_size: processes that share a batch, for a launcher that autobatch does not know; None for those
            that torchrun has started, else 1.
        progress: as in `probe`.
        options: those of ``autobatch plan``.

    Raises:
        InputError: an option, the device or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise InputError(f"world_size must be a whole number of 1 or more, found {world_size!r}")
    values = {"target_batch": target_batch, **options}
    is_alone = world_size is not None or "RANK" not in os.environ
    environ = {} if is_alone else os.environ
    result = _run("plan", values, workload, progress, environ, world_size=world_size)
    assert result.plan is not None
    return PlanResult(**asdict(result.plan), device=result.device, probe=result.probe, notes=result.notes)


def estimate(
    workload: WorkloadSource = None,
    *,
    target_batch: int | None = None,
    **options: Unpack[Keywords],
) -> Estimates:
    """Predict what fits on hardware that need not be here. No GPU is touched.

    Args:
        workload: as in `probe`.
        target_batch: samples per optimizer step to plan for; None for no plan.
        options: those of ``autobatch estimate``.

    Raises:
        InputError: an option, a profile or the workload is invalid.
        Unpredictable: the step cannot be traced; the message says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    return run_estimate(workload, options_from("estimate", {"target_batch": target_batch, **options}))


def tune(
    workload: WorkloadSource = None,
    *,
    target_batch: int,
    progress: ShowProgress = "auto",
    **options: Unpack[Keywords],
) -> TuneResult:
    """Probe, plan, and measure what is left to choose.

    Args:
        workload: as in `probe`.
        target_batch: samples per optimizer step, exactly.
        progress: as in `probe`.
        options: those of ``autobatch tune``.

    Raises:
        InputError: an option, the device or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    result = _run("tune", {"target_batch": target_batch, **options}, workload, progress)
    return TuneResult(**asdict(result))


def fit(
    workload: WorkloadSource = None,
    *,
    target_batch: int,
    progress: ShowProgress = "auto",
    sinks: Sequence[Sink] = (),
    until: Until | None = None,
    **options: Unpack[Keywords],
) -> FitResult:
    """Probe, plan, tune, train, validate and report.

    Args:
        workload: as in `probe`.
        target_batch: samples per optimizer step, exactly.
        progress: as in `probe`.
        sinks: receive the records of the training besides ``metrics.jsonl`` (see ``examples/sinks.py``).
        until: called with the record of each step, after its validation. If it returns something true, the
            run ends there as after its last step (early stopping, a budget of samples). Of several ranks,
            rank 0 decides. What it raises ends the run after a checkpoint.
        options: those of ``autobatch fit``.

    Returns:
        The records of every part, and the trained ``model``.

    Raises:
        InputError: an option, the device or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        NonFiniteError: the loss or the gradient is not finite, and ``on_nonfinite`` is ``raise``.
        CheckpointError: a checkpoint, the metrics or the weights could not be written.
        OSError: another file of the run could not be read or written.
        RestartSmallerError: out of memory where the run cannot recover.
        Interrupted: a signal stopped the run; a checkpoint was written.
    """
    values = {"target_batch": target_batch, **options}
    if not (until is None or callable(until)):
        raise InputError(f"until must be a function of the record of a step, found {kind_of(until)}")
    result = _run("fit", values, workload, progress, sinks=tuple(sinks), until=until)
    return FitResult(**asdict(result))


def _run(
    command: str,
    values: Mapping[str, Any],
    workload: WorkloadSource,
    progress: ShowProgress,
    environ: Mapping[str, str] = os.environ,
    **fields: Any,
) -> Result:
    """Check the options of a command, and run it in the ranks that an environment describes."""
    options = options_from(command, values)
    with listening(progress) as listener:
        ranks = open_ranks(environ, options.collective_timeout)
        run = Run(workload=workload, options=options, progress=listener, ranks=ranks, **fields)
        try:
            result = run_command(run)
        except BaseException as error:  # ends all ranks
            ranks.fail(error_text(error), getattr(error, "exit_code", 1))
            raise
        ranks.close()
    return result


class LoggedNotes(Progress):
    """Remarks of a run as warnings of ``logging.getLogger("autobatch")``."""

    def note(self, text: str) -> None:
        """Log a remark."""
        logging.getLogger("autobatch").warning("%s", one_line(text))


def listening(progress: ShowProgress) -> AbstractContextManager[Progress]:
    """Return the listener of a call, which is open within a block.

    Args:
        progress: the user's listener, or whether to show the progress.

    Raises:
        InputError: it is neither.
    """
    if isinstance(progress, Progress):
        return nullcontext(progress)
    if progress not in (True, False, "auto"):
        raise InputError(f'progress must be "auto", True, False or an autobatch.Progress, found {progress!r}')
    is_notebook = Console().is_jupyter
    stream = sys.stdout if is_notebook else sys.stderr
    is_first = os.environ.get("RANK", "0") == "0"  # the other ranks would show the same
    is_watched = is_first and (is_notebook or (stream is not None and stream.isatty()))
    return Terminal(stream) if progress is True or (progress and is_watched) else nullcontext(LoggedNotes())
