"""The contract of a device: a memory budget, a way to enforce it, and readings.

A `Device` returns a `Meter` for whatever runs on it: `enforced()` for a probe, `training()` for a real run.
All that differs between GPUs, the CPU and simulated GPUs is an answer of these two protocols. Nothing outside
this package depends on the kind of a device.
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
    from autobatch.device.hardware_profile import Libraries


class Meter(Protocol):
    """Readings of one session on a device."""

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made out of sight of the device (a batch, for example).

        Raises:
            torch.OutOfMemoryError: They do not fit in the budget.
        """

    def uncounted(self) -> AbstractContextManager[None]:
        """Count nothing within the block: for work that stays on the host, such as collating a batch."""

    def mark(self, phase: str) -> None:
        """Record that a phase begins; see `autobatch.step.train_step.Mark`."""

    def stats(self) -> MemoryStats:
        """Read the allocator. In a probe, wait first until the device has finished its work."""

    def trace(self) -> Trace | None:
        """Return the allocation events since the session began; None if none are recorded."""


class Device(Protocol):
    """A place to train, with a memory budget."""

    @property
    def kind(self) -> str:
        """``cuda``, ``cpu`` or ``sim``: for reports and cache keys, never to decide anything."""

    @property
    def torch_device(self) -> torch.device:
        """Device of the tensors."""

    @property
    def budget_bytes(self) -> int:
        """Bytes the allocator may hold."""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor of the GPU that runs the operators; None if the CPU runs them."""

    @property
    def allocator_config(self) -> AllocatorConfig | None:
        """Settings of its caching allocator; None if it caches nothing."""

    @property
    def libraries(self) -> Libraries | None:
        """Memory of the libraries on the GPU that runs the operators; None if the CPU runs them."""

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
        """Return the implementations of an optimizer that differ here, ``default`` first."""

    def compiler_missing(self) -> str | None:
        """Return what ``torch.compile`` lacks here, in words; None if nothing."""

    def new_allocator(self) -> Allocator:
        """Return an empty model of its allocator, limited to the budget, to replay events in."""

    def describe(self) -> DeviceRecord:
        """Read the machine anew and return name, total, budget and the other processes that hold memory."""

    def enforced(self) -> AbstractContextManager[Meter]:
        """Start with an empty cache, and raise ``torch.OutOfMemoryError`` over the budget in the block."""

    def training(self) -> AbstractContextManager[Meter]:
        """Run real training within the block, at full speed if the device itself enforces its limit."""

    def why_not_expandable(self) -> str | None:
        """Return why its allocator cannot switch to expandable segments; None if it can."""

    def expandable(self) -> Device:
        """Return the same device with expandable segments, if its allocator can switch to them."""

    def budgeted(self, budget_bytes: int) -> Device:
        """Return the same device with the budget of a probe, or with as much of it as is free."""

    def refuses(self, stats: MemoryStats) -> str | None:
        """Return why a step that ran does not count as fitting (retries, for example); None if it fits."""

    def release(self) -> None:
        """Free cached memory; call it outside of any ``except`` block."""

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
