"""Attempts whose failures are answers: for another reason than memory, or although the budget has room.

On a GPU with much memory a search reaches sizes that nobody asked for. There a grid may be too large for a
launch, an index may not fit in 32 bits, and a kernel may read past its end. The sizes below still run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from autobatch.core.errors import AutobatchError, UserCodeError
from autobatch.core.records.probe import Attempt
from autobatch.core.text import error_text
from autobatch.device.oom import loses_context
from autobatch.setup.attempt import Outcome
from autobatch.setup.child import ChildCrashed, SetupProcess

LOST = "lost GPU context"
"""The reason for which a search stops if the process that lost its context cannot be replaced."""


class FailedSizes:
    """A run of sizes in which an error above a size that fits is an outcome.

    Args:
        run: makes an attempt, and raises what the workload raises.
        process: holds the setup; a new child takes the place of one that crashed or lost its GPU context.
    """

    def __init__(self, run: Callable[[int], Outcome], process: SetupProcess) -> None:
        self._run = run
        self._process = process
        self._largest = 0
        """The largest size that has fitted."""
        self.stopped_by: str | None = None
        """`LOST` once no further size can run; None otherwise."""

    def __call__(self, size: int) -> Outcome:
        """Make an attempt; one that the budget did not refuse is repeated once.

        Raises:
            InputError: the workload is invalid.
            Exception: whatever the workload raises at fewer samples than fit.
        """
        outcome = self._attempt(size)
        if outcome.attempt.is_below_budget:
            outcome = self._attempt(size)
        if outcome.attempt.fits:
            self._largest = max(self._largest, size)
        return outcome

    def _attempt(self, size: int) -> Outcome:
        failure: Exception
        try:
            return self._run(size)
        except Exception as error:
            may_depend_on_size = not isinstance(error, AutobatchError) or isinstance(
                error, UserCodeError | ChildCrashed
            )
            if size <= self._largest or not may_depend_on_size:
                raise
            failure = error
        # Outside of the except block, so that nothing holds the tensors of the failed attempt.
        traceback.clear_frames(failure.__traceback__)
        if isinstance(failure, ChildCrashed) or loses_context(failure):
            if self._process.is_replaceable:
                self._process.restart()
            else:
                self.stopped_by = LOST
        attempt = Attempt(
            micro_batch=size,
            fits=False,
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            seconds=0.0,
            reason=error_text(failure, first_line=True),
            is_error=True,
        )
        return Outcome(attempt, None, error=failure)
