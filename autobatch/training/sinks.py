"""Sinks of the user: where else the records of a run go, for example W&B, MLflow or Aim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autobatch.core.progress import Progress
from autobatch.core.records.training import StepRecord, Training
from autobatch.core.text import error_text


class Sink(Protocol):
    """Receiver of the records of a run.

    A method that raises does not end the run: the sink is left out from then on, and a note has the reason.
    """

    def step(self, record: StepRecord) -> None:
        """Receive the record of a batch, after its validation if there was one."""

    def end(self, training: Training) -> None:
        """Receive the summary of a run that reached its end."""

    def close(self) -> None:
        """Finish; called once, whether the run reached its end or failed."""


class UserSinks:
    """The sinks of a run, as one writer of metrics.

    Args:
        sinks: the user's.
        progress: receives a note if one fails.
    """

    def __init__(self, sinks: Sequence[Sink], progress: Progress) -> None:
        self._sinks = list(sinks)
        self._progress = progress

    def step(self, record: StepRecord) -> None:
        """Hand the record of a batch to every sink."""
        if self._sinks:
            self._each("step", lambda sink: sink.step(record))

    def flush(self) -> None:
        """Do nothing: a resume reads no sink."""

    def end(self, training: Training) -> None:
        """Hand the summary to every sink."""
        self._each("end", lambda sink: sink.end(training))

    def close(self) -> None:
        """Finish every sink."""
        self._each("close", lambda sink: sink.close())

    def _each(self, method: str, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # whatever a tracker raises, the run continues
                self._sinks.remove(sink)
                self._progress.note(
                    f"{type(sink).__name__}.{method} raised {type(error).__name__}: {error_text(error)}. The "
                    "run continues without this sink"
                )
