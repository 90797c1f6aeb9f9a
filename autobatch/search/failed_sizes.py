"""Sizes that fail for another reason than memory: they bound a search from above, and do not end it.

On a GPU with much memory a search reaches sizes that nobody asked for. There a grid may be too large for a
launch, an index may not fit in 32 bits, and a kernel may read past its end. The sizes below still run.
"""

from __future__ import annotations

from collections.abc import Callable

from autobatch.core.errors import AutobatchError, UserCodeError
from autobatch.core.records.probe import Attempt
from autobatch.core.text import error_text
from autobatch.device.oom import loses_context
from autobatch.setup.attempt import Outcome
from autobatch.setup.child import ChildCrashed, SetupProcess

FEW = 2
"""A size at which every workload must run."""
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
        self.largest = 0
        """The largest size that has fitted."""
        self.stopped_by: str | None = None
        """`LOST` once no further size can run; None otherwise."""

    def __call__(self, size: int) -> Outcome:
        """Make an attempt.

        Raises:
            InputError: the workload is invalid, and no size has fitted.
            ChildCrashed: the child crashed, and no size has fitted.
            Exception: whatever the workload raises at `FEW` samples, or at fewer than fit.
        """
        failure: Exception
        try:
            outcome = self._run(size)
        except Exception as error:
            if not self._may_be_too_large(size, error):
                raise
            failure = error
        else:
            if outcome.attempt.fits:
                self.largest = max(self.largest, size)
            return outcome
        # Outside of the except block, so that nothing holds the tensors of the failed attempt.
        if isinstance(failure, ChildCrashed) or loses_context(failure):
            if self._process.is_replaceable:
                self._process.restart()
            else:
                self.stopped_by = LOST
        return Outcome(
            Attempt(
                micro_batch=size,
                fits=False,
                peak_allocated_bytes=None,
                peak_reserved_bytes=None,
                seconds=0.0,
                reason=error_text(failure, first_line=True),
                is_error=True,
            ),
            None,
        )

    def _may_be_too_large(self, size: int, error: Exception) -> bool:
        if self.largest:
            return size > self.largest
        is_certain = isinstance(error, AutobatchError) and not isinstance(error, UserCodeError)
        return size > FEW and not is_certain
