"""What a device is to the rest of the house: a budget, a way to enforce it, and readings.

A `Device` is asked for a `Meter` whenever something runs: `enforced()` for a probe, `training()` for a
real run. What differs between cards, the host and the simulated card stands behind these two protocols;
the probe and the loop know no device by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from autobatch.device.allocator.ledger import MemoryStats

if TYPE_CHECKING:
    import torch

    from autobatch.core.records import DeviceRecord
    from autobatch.device.allocator.ledger import Allocator
    from autobatch.device.allocator.trace import Trace


class Meter(Protocol):
    """Readings of one session on a device."""

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made out of the device's sight (a batch, say) as held on it.

        Raises:
            torch.OutOfMemoryError: they do not fit in the budget.
        """

    def uncounted(self) -> AbstractContextManager[None]:
        """Inside, nothing is counted: for what a card would never see, such as a batch being joined."""

    def mark(self, phase: str) -> None:
        """Say what comes next; see `autobatch.step.train_step.Mark`."""

    def stats(self) -> MemoryStats:
        """Read the allocator; in a probe, waits for the device to finish what it was given."""

    def trace(self) -> Trace | None:
        """The allocation events since the session began; ``None`` where none are recorded."""


class Device(Protocol):
    """A place to train, with a memory budget."""

    @property
    def kind(self) -> str:
        """``cuda``, ``cpu`` or ``sim``."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors live."""

    @property
    def budget_bytes(self) -> int:
        """What the allocator may hold."""

    def new_allocator(self) -> Allocator:
        """An empty model of this device's allocator with the budget as its limit, to replay events in."""

    def describe(self) -> DeviceRecord:
        """Name, total, budget and who else holds memory; reads the machine anew."""

    def enforced(self) -> AbstractContextManager[Meter]:
        """Inside, a step over the budget raises ``torch.OutOfMemoryError``; starts from nothing cached."""

    def training(self) -> AbstractContextManager[Meter]:
        """What a real run runs under; without cost where the device enforces its limit by itself."""

    def why_not_expandable(self) -> str | None:
        """Why its allocator cannot be told to grow in expandable segments; ``None``: it can."""

    def expandable(self) -> Device:
        """The same device with an allocator that grows in expandable segments, where it can be told to."""

    def refuses(self, stats: MemoryStats) -> str | None:
        """Why a step that ran does not count as fitting (retries, say); ``None``: it fits."""

    def release(self) -> None:
        """Give back what is cached; call it outside of any ``except`` block."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
