"""Progress of a run, reported without printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from autobatch.core.text import one_line

if TYPE_CHECKING:  # making the records takes as long as the rest of `autobatch --help`
    from autobatch.core.records import Attempt, DeviceRecord, LrTrial, Plan, Probe, StepRecord, Trial, Tuning


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

    def tried_rate(self, trial: LrTrial, of: int) -> None:
        """Report a learning rate that was tried."""

    def tuned(self, tuning: Tuning) -> None:
        """Report the choice of the tuner."""

    def saved(self, step: int) -> None:
        """Report a checkpoint."""

    def stepped(self, step: StepRecord, of: int) -> None:
        """Report a training step."""


class Broadcast(Progress):
    """Listener that passes every event on to several others, with each text in one line."""

    def __init__(self, listeners: Sequence[Progress]) -> None:
        for event in (name for name in vars(Progress) if not name.startswith("_")):
            setattr(self, event, partial(_pass_on, [getattr(one, event) for one in listeners]))


def _pass_on(receivers: Sequence[Any], *event: Any) -> None:
    for receive in receivers:
        receive(*(one_line(part) if isinstance(part, str) else part for part in event))
