"""Attempts of a search, and those in the process that holds the setup; a failure is an answer, too."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial

from autobatch.core.errors import AutobatchError, UserCodeError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.core.text import error_text
from autobatch.device.oom import loses_context
from autobatch.rehearsal.attempt import Outcome, attempt
from autobatch.rehearsal.process import ChildCrashed, SetupProcess, ThisProcess


def reported(attempt: Callable[[], Outcome], progress: Progress) -> Outcome:
    """Make an attempt, once more if something else than the budget refused memory, and report it."""
    outcome = attempt()
    if outcome.attempt.is_below_budget:
        outcome = attempt()
    progress.attempted(outcome.attempt)
    return outcome


def run_attempt(process: SetupProcess, micro_batch: int, progress: Progress) -> Outcome:
    """Make an attempt, and report it; see `reported`.

    Returns:
        Its outcome, with the error if the size fails for another reason than memory. A size for which the
        host ends the child process does not fit.

    Raises:
        Exception: the input is invalid at any size, or this process has lost its GPU.
    """
    progress.doing(f"running {micro_batch:,} samples at once")
    return reported(partial(_run, process, micro_batch), progress)


def _run(process: SetupProcess, micro_batch: int) -> Outcome:
    start = time.perf_counter()
    failure: Exception
    try:
        return process.call(f"an attempt at a micro-batch of {micro_batch}", attempt, micro_batch)
    except Exception as error:
        if isinstance(error, AutobatchError) and not isinstance(error, UserCodeError | ChildCrashed):
            raise
        failure = error
    # Outside of the except block, so that nothing holds the tensors of the failed attempt.
    traceback.clear_frames(failure.__traceback__)
    if isinstance(process, ThisProcess) and loses_context(failure):
        raise failure
    is_killed = isinstance(failure, ChildCrashed) and failure.out_of_memory
    failed = Attempt(
        micro_batch=micro_batch,
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=time.perf_counter() - start,
        reason="the host ran out of memory and ended the child process"
        if is_killed
        else error_text(failure, first_line=True),
        is_error=not is_killed,
    )
    return Outcome(failed, None, error=None if is_killed else failure)
