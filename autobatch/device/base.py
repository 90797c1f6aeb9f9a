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

    from autobatch.core.records import DeviceRecord, Precision
    from autobatch.device.allocator.caching import AllocatorConfig
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

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor of the GPU that runs the operators; None if the CPU runs them."""

    @property
    def allocator_config(self) -> AllocatorConfig | None:
        """Settings of its caching allocator; None if it caches nothing."""

    @property
    def is_traceable(self) -> bool:
        """True if a trace without memory sees all that a step allocates."""

    @property
    def may_spill(self) -> bool:
        """True if the driver may move memory to the host where an allocation should fail."""

    @property
    def reads_pinned_memory(self) -> bool:
        """True if it copies from pinned host memory while it computes."""

    @property
    def gains_from_compile(self) -> bool:
        """True if ``torch.compile`` is worth trying unasked."""

    def default_precision(self) -> Precision:
        """Return the precision of ``--precision auto``."""

    def native_precisions(self) -> tuple[Precision, ...]:
        """Return the precisions that it computes in without emulation, the default first.

        16 bits that are slower than 32 are no choice. fp16 is one only without bf16: at the same speed, it
        needs a loss scale and overflows sooner.
        """

    def optimizer_implementations(self) -> tuple[str, ...]:
        """Return the implementations that differ here, ``default`` first."""

    def compiler_missing(self) -> str | None:
        """Return what ``torch.compile`` lacks here, in words; None if nothing."""

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
