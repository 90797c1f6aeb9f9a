"""Listeners of a library call: the terminal or notebook, the log, and the user's own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from autobatch.core.errors import InputError
from autobatch.core.progress import Broadcast, Progress
from autobatch.core.records import Attempt, DeviceRecord, Plan, Probe, Tuning
from autobatch.report.facts import describe_budget, describe_fits, describe_plan, describe_tuning

LOG = logging.getLogger("autobatch")
ShowProgress = Progress | Literal["auto"] | bool
"""A listener, or whether to show the progress; ``auto`` shows it in terminals and notebooks."""


class LoggedProgress(Progress):
    """Progress as records of ``logging.getLogger("autobatch")``.

    Args:
        note_level: level of the notes; a warning if no other listener shows them.
    """

    def __init__(self, note_level: int = logging.INFO) -> None:
        self._note_level = note_level

    def note(self, text: str) -> None:
        """Log a remark."""
        LOG.log(self._note_level, "%s", text)

    def doing(self, act: str) -> None:
        """Log what happens from now on."""
        LOG.debug("%s", act)

    def opened(self, device: DeviceRecord) -> None:
        """Log the device and its budget."""
        LOG.info("device %s, memory budget %s", device.name, describe_budget(device))

    def attempted(self, attempt: Attempt) -> None:
        """Log a micro-batch that ran."""
        LOG.info("%s samples %s", attempt.micro_batch, "fit" if attempt.fits else "do not fit")

    def probed(self, probe: Probe) -> None:
        """Log the largest micro-batch."""
        LOG.info("fits: %s", describe_fits(probe))

    def planned(self, plan: Plan) -> None:
        """Log the split of the batch."""
        LOG.info("plan: %s", describe_plan(plan))

    def tuned(self, tuning: Tuning) -> None:
        """Log the choice of the tuner."""
        LOG.info("tuned: %s", describe_tuning(tuning))


@contextmanager
def listening(progress: ShowProgress) -> Iterator[Progress]:
    """Open the listener of a call within the block.

    Args:
        progress: the user's listener, or whether to show the progress.

    Raises:
        InputError: it is neither.
    """
    if isinstance(progress, Progress):
        yield Broadcast([progress, LoggedProgress()])
        return
    if progress not in (True, False, "auto"):
        raise InputError(f'progress must be "auto", True, False or an autobatch.Progress, found {progress!r}')
    stream = _stream() if progress == "auto" else sys.stderr if progress else None
    if stream is None:
        yield LoggedProgress(logging.WARNING)
        return
    from autobatch.report.terminal import Terminal

    with Terminal(stream) as terminal:
        yield Broadcast([terminal, LoggedProgress()])


def _stream() -> TextIO | None:
    """Return the stream that the user reads; None if there is none, or if another rank shows the same."""
    if os.environ.get("RANK", "0") != "0":
        return None
    if _in_notebook():
        return sys.stdout
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None


def _in_notebook() -> bool:
    """Check for a notebook without importing IPython: if nothing did, there is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
