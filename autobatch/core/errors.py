"""Every error that autobatch raises on purpose, under one root.

    AutobatchError                          exit 1
    ├── InputError (ValueError)             exit 2    option, config, workload or profile: it cannot be
    │   └── UserCodeError                              the user's own code raised; traceback in the notes
    ├── DoesNotFitError (RuntimeError)      exit 3    not even a micro-batch of 1 fits
    ├── RestartSmallerError (RuntimeError)  exit 77   out of memory where nothing can be mended in place
    ├── CheckpointError (OSError)           exit 1    a checkpoint could not be written or read
    ├── NonFiniteError (ArithmeticError)    exit 1    the loss or the gradient is not a number
    └── Interrupted                         exit 130 or 143   stopped by a signal, after a checkpoint

Each message says what was asked, what was found (both numbers) and what to do.
"""

from __future__ import annotations


class AutobatchError(Exception):
    """Root of all errors that autobatch raises on purpose."""

    exit_code: int = 1
    """What the command line exits with."""


class InputError(AutobatchError, ValueError):
    """The user's input is wrong; the message is one clear line."""

    exit_code = 2


class UserCodeError(InputError):
    """An exception out of the user's own code, told in one line; the whole traceback is in its notes."""


class DoesNotFitError(AutobatchError, RuntimeError):
    """Not even a micro-batch of 1 fits in the budget; says where the memory goes and what would help."""

    exit_code = 3


class RestartSmallerError(AutobatchError, RuntimeError):
    """Out of memory across ranks or inside ``optimizer.step()``: leave, and start again smaller."""

    exit_code = 77


class CheckpointError(AutobatchError, OSError):
    """A checkpoint could not be written, or none that is valid could be read."""


class NonFiniteError(AutobatchError, ArithmeticError):
    """The loss or the gradient of a window is not finite; no step was taken."""


class Interrupted(AutobatchError):  # noqa: N818 - an event, not a fault
    """A signal asked the run to stop; a checkpoint was written first."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
