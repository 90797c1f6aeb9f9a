"""Every error that autobatch raises on purpose, under one root.

Each message says what was asked, what was found (both numbers) and what to do.
"""

from __future__ import annotations

from autobatch.core.text import printable, printable_lines


class AutobatchError(Exception):
    """Root of all errors that autobatch raises on purpose.

    A traceback of a library call prints the text and the notes, and both may quote files of anyone.
    """

    exit_code: int = 1
    """Exit code of the command line."""

    def __str__(self) -> str:
        """Return the message, `printable`."""
        return printable(super().__str__(), limit=None)

    def add_note(self, note: str) -> None:
        """Add a note, each line `printable`."""
        super().add_note(printable_lines(note, limit=None))


class InputError(AutobatchError, ValueError):
    """Wrong input of the user; the message is one line."""

    exit_code = 2


class UserCodeError(InputError):
    """Exception out of the user's own code, as one line; the traceback is in its notes."""


class DoesNotFitError(AutobatchError, RuntimeError):
    """Not even a micro-batch of 1 fits; the message says what uses the memory and what would help."""

    exit_code = 3


class RestartSmallerError(AutobatchError, RuntimeError):
    """Out of memory across ranks or in ``optimizer.step()``: exit, and restart with a smaller micro-batch."""

    exit_code = 77


class CheckpointError(AutobatchError, OSError):
    """A checkpoint or another file of a run could not be written, or one checkpoint is damaged."""


class NonFiniteError(AutobatchError, ArithmeticError):
    """The loss or the gradient of a batch is not finite; no optimizer step was taken."""


class Infeasible(AutobatchError):  # noqa: N818 - a result of a trial
    """End of a trial whose configuration must not be chosen, with the reason in one line."""


class Interrupted(AutobatchError):  # noqa: N818 - an event, not a fault
    """A signal asked the run to stop; a checkpoint was written first."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
