"""Attempts of a probe in the process that holds the setup; a failure is an answer, too.

A size for which the host ends the process, or whose memory spills to the host's, does not fit. An error above
a size that fits bounds the search. A refusal that the budget did not cause is repeated once.
"""

from __future__ import annotations

import time
import traceback

import msgspec

from autobatch.core.errors import AutobatchError, DoesNotFitError, UserCodeError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.core.text import error_text
from autobatch.core.units import format_bytes
from autobatch.device.oom import loses_context
from autobatch.footprint.explain import explain
from autobatch.rehearsal.attempt import Outcome, attempt
from autobatch.rehearsal.process import ChildCrashed, SetupProcess

SPILL_FACTOR = 3.0
"""A size that takes this much longer per sample than the fastest does not run in the GPU's own memory."""


def run_attempt(process: SetupProcess, micro_batch: int) -> Outcome:
    """Make one attempt. If the host killed the child for want of memory, the size does not fit.

    Raises:
        InputError: the workload raised.
        ChildCrashed: the child crashed for another reason.
    """
    start = time.perf_counter()
    try:
        outcome = process.call(f"an attempt at a micro-batch of {micro_batch}", attempt, micro_batch)
    except ChildCrashed as crash:
        if not crash.out_of_memory:
            raise
        reason = "the host ran out of memory and ended the child process"
        outcome = _failed(micro_batch, reason, time.perf_counter() - start)
    if outcome.is_context_lost:
        process.restart()
    return outcome._replace(is_context_lost=False)


class Attempts:
    """Attempts of one probe; a new child takes the place of one that crashed or lost its GPU context."""

    def __init__(self, process: SetupProcess, progress: Progress) -> None:
        self._process = process
        self._progress = progress
        self._largest = 0
        """The largest size that has fitted."""
        self._best_seconds: float | None = None
        """The shortest time of a step per sample."""

    def run(self, size: int) -> Outcome:
        """Make an attempt.

        Returns:
            Its outcome. It has the error of a size above all that have fitted, and ``is_context_lost`` if the
            process can run no further size.

        Raises:
            Exception: the workload raised at a size that has fitted, or the process cannot run at all.
        """
        outcome = self._run(size)
        if outcome.attempt.is_below_budget:
            outcome = self._run(size)
        self._progress.attempted(outcome.attempt)
        return outcome

    def _run(self, size: int) -> Outcome:
        self._progress.doing(f"running {size:,} samples at once")
        failure: Exception
        try:
            outcome = self._without_spill(run_attempt(self._process, size))
        except Exception as error:
            is_of_this_size = isinstance(error, UserCodeError | ChildCrashed)
            if size <= self._largest or (isinstance(error, AutobatchError) and not is_of_this_size):
                raise
            failure = error
        else:
            if outcome.attempt.fits:
                self._largest = max(self._largest, size)
            return outcome
        # Outside of the except block, so that nothing holds the tensors of the failed attempt.
        traceback.clear_frames(failure.__traceback__)
        is_lost = isinstance(failure, ChildCrashed) or loses_context(failure)
        if is_lost:
            self._process.restart()
        failed = _failed(size, error_text(failure, first_line=True), 0.0, is_error=True)
        return failed._replace(error=failure, is_context_lost=is_lost and not self._process.is_replaceable)

    def _without_spill(self, outcome: Outcome) -> Outcome:
        """Reject a size that runs several times slower per sample: some drivers spill to the host's memory.

        Smaller sizes than those that ran well are slower for what comes once a step, and are not rejected.
        """
        ran = outcome.attempt
        if not (self._process.info.may_spill and ran.fits and ran.step_seconds):
            return outcome
        seconds = ran.step_seconds / ran.micro_batch
        best = self._best_seconds
        if best is not None and ran.micro_batch > self._largest and seconds > SPILL_FACTOR * best:
            reason = (
                f"it runs at {seconds / best:.1f} times the best time per sample: the driver seems to spill "
                "to the host's memory instead of failing"
            )
            return Outcome(msgspec.structs.replace(ran, fits=False, reason=reason), None)
        self._best_seconds = seconds if best is None else min(best, seconds)
        return outcome


def nothing_fits(
    process: SetupProcess, smallest: Outcome, single_error: str | None = None
) -> DoesNotFitError:
    """Build the error that explains the memory of the smallest attempt, and lists what helps.

    Args:
        process: holds the setup.
        smallest: the attempt, with its events up to the failure.
        single_error: the error of a micro-batch of 1, if it was not out of memory, too.
    """
    last = smallest.attempt
    parts = [
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(process.info.device.budget_bytes)}: {str(last.reason).removesuffix('.')}"
        + (f" (in the {last.phase})" if last.phase else "")
    ]
    largest = process.info.largest_sample
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


def _failed(size: int, reason: str, seconds: float, *, is_error: bool = False) -> Outcome:
    """Return an attempt that has measured nothing."""
    failed = Attempt(
        micro_batch=size,
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=seconds,
        reason=reason,
        is_error=is_error,
    )
    return Outcome(failed, None, is_context_lost=not is_error)
