"""Where the parts of a run tell what they are doing: a port, so that nothing below prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autobatch.core.records import Attempt, DeviceRecord, Plan, Probe, StepRecord, Tuning


class Progress(Protocol):
    """Told of what happens, in the order in which it happens."""

    def note(self, text: str) -> None:
        """Something that a person should know, in one line."""

    def opened(self, device: DeviceRecord) -> None:
        """The device and its budget are known."""

    def attempted(self, attempt: Attempt) -> None:
        """A micro-batch ran."""

    def probed(self, probe: Probe) -> None:
        """The largest micro-batch is known."""

    def planned(self, plan: Plan) -> None:
        """The split is known."""

    def measured(
        self, number: int, of: int, values: Mapping[str, object], samples_per_s: float, failure: str | None
    ) -> None:
        """A trial of the tuner ran."""

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """A learning rate was tried."""

    def tuned(self, tuning: Tuning) -> None:
        """The tuner has chosen."""

    def stepped(self, step: StepRecord, of: int) -> None:
        """A window was trained."""


class Silent:
    """Says nothing: what library calls use."""

    def note(self, text: str) -> None:
        """See `Progress`."""

    def opened(self, device: DeviceRecord) -> None:
        """See `Progress`."""

    def attempted(self, attempt: Attempt) -> None:
        """See `Progress`."""

    def probed(self, probe: Probe) -> None:
        """See `Progress`."""

    def planned(self, plan: Plan) -> None:
        """See `Progress`."""

    def measured(
        self, number: int, of: int, values: Mapping[str, object], samples_per_s: float, failure: str | None
    ) -> None:
        """See `Progress`."""

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """See `Progress`."""

    def tuned(self, tuning: Tuning) -> None:
        """See `Progress`."""

    def stepped(self, step: StepRecord, of: int) -> None:
        """See `Progress`."""
