"""Attempts of a probe in the process that holds the setup; a failure is an answer, too."""

from __future__ import annotations

import time
import traceback

from autobatch.core.errors import AutobatchError, DoesNotFitError, UserCodeError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.core.text import error_text
from autobatch.core.units import format_bytes
from autobatch.device.oom import loses_context
from autobatch.footprint.explain import explain
from autobatch.rehearsal.attempt import Outcome, attempt
from autobatch.rehearsal.process import ChildCrashed, SetupProcess, ThisProcess


def run_attempt(process: SetupProcess, micro_batch: int, progress: Progress) -> Outcome:
    """Make an attempt, and report it; repeat it once if something else than the budget refused memory.

    Returns:
        Its outcome, with the error if the size fails for another reason than memory. A size for which the
        host ends the child process does not fit.

    Raises:
        Exception: the input is invalid at any size, or this process has lost its GPU.
    """
    progress.doing(f"running {micro_batch:,} samples at once")
    outcome = _run(process, micro_batch)
    if outcome.attempt.is_below_budget:
        outcome = _run(process, micro_batch)
    progress.attempted(outcome.attempt)
    return outcome


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


def nothing_fits(
    process: SetupProcess, smallest: Outcome, single_error: str | None = None
) -> DoesNotFitError:
    """Build the error that explains the memory of the smallest attempt, and lists what helps.

    ``single_error`` is that of a micro-batch of 1, if it was not out of memory, too.
    """
    last, largest = smallest.attempt, process.info.largest_sample
    parts = [
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(process.info.device.budget_bytes)}: {str(last.reason).removesuffix('.')}"
        + (f" (in the {last.phase})" if last.phase else "")
    ]
    if largest is not None and last.micro_batch == 1:
        index, size = largest
        parts.append(f"It ran with sample {index} of the training data, the largest: its size is {size:g}")
    if smallest.trace is not None and smallest.trace.marks:
        parts.append(f"It took {explain(smallest.trace).text()}")
    if single_error:
        parts.append(f"A micro-batch of 1 cannot run: {single_error.removesuffix('.')}")
    # The memory of a loss over the whole batch depends on the target batch, not on the micro-batch.
    smaller = ", a smaller target batch" if last.phase == "loss" else ""
    shorter = ", samples cut shorter or left out" if largest is not None else ""
    parts.append(f"What helps: a larger --memory-budget{smaller}{shorter}")
    return DoesNotFitError(". ".join(parts))
