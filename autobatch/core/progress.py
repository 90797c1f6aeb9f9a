"""Progress of a run, reported without printing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # making the records takes as long as the rest of `autobatch --help`
    from autobatch.core.records import Attempt, DeviceRecord, LrTrial, StepRecord, Trial


class Progress:
    """Listener of a run that ignores every event; subclasses override the events that they show.

    Events arrive in the order in which they happen. Their texts may quote files of anyone.
    """

    def doing(self, act: str) -> None:
        """Report what happens from now on until the next event, for example ``tracing a step``."""

    def note(self, text: str) -> None:
        """Report a remark for the user, in one line."""

    def opened(self, device: DeviceRecord) -> None:
        """Report the device and its budget."""

    def attempted(self, attempt: Attempt) -> None:
        """Report a micro-batch that ran."""

    def measured(self, trial: Trial, of: int, changes: Mapping[str, object]) -> None:
        """Report a trial of the tuner, and the values of its configuration that differ from the default."""

    def tried_rate(self, trial: LrTrial, of: int) -> None:
        """Report a learning rate that was tried."""

    def saved(self, step: int) -> None:
        """Report a checkpoint."""

    def stepped(self, step: StepRecord, of: int) -> None:
        """Report a training step."""
