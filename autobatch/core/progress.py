"""Progress of a run, reported without printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobatch.core.records import Attempt, DeviceRecord, Plan, Probe, StepRecord, Trial, Tuning


class Progress:
    """Listener of a run that ignores every event; subclasses override the events that they show.

    Events arrive in the order in which they happen.
    """

    def doing(self, act: str) -> None:
        """Report what happens from now on until the next event, for example ``tracing a step``."""

    def note(self, text: str) -> None:
        """Report a remark for the user, in one line."""

    def opened(self, device: DeviceRecord) -> None:
        """Report the device and its budget."""

    def attempted(self, attempt: Attempt) -> None:
        """Report a micro-batch that ran."""

    def probed(self, probe: Probe) -> None:
        """Report the largest micro-batch."""

    def planned(self, plan: Plan) -> None:
        """Report the split of the batch."""

    def measured(self, trial: Trial, of: int, changes: Mapping[str, object]) -> None:
        """Report a trial of the tuner, and the values of its configuration that differ from the default."""

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """Report a learning rate that was tried."""

    def tuned(self, tuning: Tuning) -> None:
        """Report the choice of the tuner."""

    def saved(self, step: int) -> None:
        """Report a checkpoint."""

    def stepped(self, step: StepRecord, of: int) -> None:
        """Report a training step."""


class Broadcast(Progress):
    """Listener that tells several others of every event.

    Args:
        listeners: the others, in the order in which they are told.
    """

    def __init__(self, listeners: Sequence[Progress]) -> None:
        self._listeners = listeners

    def doing(self, act: str) -> None:
        """Tell of an act."""
        for one in self._listeners:
            one.doing(act)

    def note(self, text: str) -> None:
        """Tell of a remark."""
        for one in self._listeners:
            one.note(text)

    def opened(self, device: DeviceRecord) -> None:
        """Tell of the device."""
        for one in self._listeners:
            one.opened(device)

    def attempted(self, attempt: Attempt) -> None:
        """Tell of a micro-batch that ran."""
        for one in self._listeners:
            one.attempted(attempt)

    def probed(self, probe: Probe) -> None:
        """Tell of the largest micro-batch."""
        for one in self._listeners:
            one.probed(probe)

    def planned(self, plan: Plan) -> None:
        """Tell of the split."""
        for one in self._listeners:
            one.planned(plan)

    def measured(self, trial: Trial, of: int, changes: Mapping[str, object]) -> None:
        """Tell of a trial."""
        for one in self._listeners:
            one.measured(trial, of, changes)

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """Tell of a learning rate that was tried."""
        for one in self._listeners:
            one.tried_rate(number, of, learning_rate, loss, failure)

    def tuned(self, tuning: Tuning) -> None:
        """Tell of the choice of the tuner."""
        for one in self._listeners:
            one.tuned(tuning)

    def saved(self, step: int) -> None:
        """Tell of a checkpoint."""
        for one in self._listeners:
            one.saved(step)

    def stepped(self, step: StepRecord, of: int) -> None:
        """Tell of a training step."""
        for one in self._listeners:
            one.stepped(step, of)


SILENT = Progress()
"""Listener that ignores every event."""
