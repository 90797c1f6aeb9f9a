"""A simulated GPU: real CPU tensors in a model of CUDA's caching allocator, with the budget of that GPU.

Out-of-memory errors, recovery and fragmentation run without a GPU. The limit is always enforced, in training
as well. Operators are not simulated: kernels, autocast lists and workspaces are the CPU's, so a micro-batch
found here is not the GPU's (`autobatch.footprint.predict` is for that).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from autobatch.core.records import DeviceRecord
from autobatch.core.units import MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import BudgetExceeded, cuda_oom_text
from autobatch.device.allocator.tracker import StorageMeter
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, Meter, resolve_budget
from autobatch.device.profiles import HardwareProfile

USUAL_CONTEXT_BYTES = 512 * MiB
"""CUDA context of a GPU without a figure: CUDA's out-of-memory texts show between 0.1 and 0.7 GiB."""


def simulated_budget(profile: HardwareProfile, memory_budget: str | int | None = None) -> tuple[int, str]:
    """Return the bytes that the allocator may hold on a GPU without other processes, and the reason in words.

    Raises:
        InputError: The budget is no size, or exceeds the memory of the GPU.
        DoesNotFitError: The GPU is smaller than its CUDA context and the headroom.
    """
    return resolve_budget(
        memory_budget,
        total_bytes=profile.total_bytes,
        available=[(profile.total_bytes, "in total"), (-context_bytes(profile), "CUDA context")],
        headroom_share=GPU_HEADROOM_SHARE,
        owner=profile.title,
    )


def context_bytes(profile: HardwareProfile) -> int:
    """Return the memory that the CUDA context takes on a GPU."""
    return USUAL_CONTEXT_BYTES if profile.context_bytes is None else profile.context_bytes


class SimulatedDevice(Device):
    """The GPU of a hardware profile, simulated on the CPU.

    Args:
        profile: The GPU.
        memory_budget: Taken literally: a size, or a share of the GPU's memory. None for its memory less its
            CUDA context and a headroom.
        expandable_segments: Whether the allocator uses expandable segments. No environment variable is read.

    Raises:
        InputError: The budget is no size, or exceeds the memory of the GPU.
        DoesNotFitError: The GPU is smaller than its CUDA context and the headroom.
    """

    kind = "sim"

    def __init__(
        self,
        profile: HardwareProfile,
        memory_budget: str | int | None = None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        super().__init__(*simulated_budget(profile, memory_budget))
        self._profile = profile
        self._config = AllocatorConfig(expandable_segments=expandable_segments)
        self._session: CachingAllocator | None = None

    @property
    def allocator_config(self) -> AllocatorConfig:
        """Settings of the allocator that is simulated."""
        return self._config

    def new_allocator(self) -> CachingAllocator:
        """Return an empty allocator limited to the budget."""
        return CachingAllocator(self._budget_bytes, self._config)

    def describe(self) -> DeviceRecord:
        """Return name, total and budget of the GPU."""
        return DeviceRecord(
            kind=self.kind,
            name=f"{self._profile.title} (simulated)",
            total_bytes=self._profile.total_bytes,
            budget_bytes=self._budget_bytes,
            budget_source=self._budget_source,
            other_processes_bytes=0,
            notes=["simulated: CPU tensors in a model of CUDA's caching allocator, at the speed of this CPU"],
        )

    @contextmanager
    def enforced(self) -> Iterator[Meter]:
        """Start with an empty cache, and raise ``torch.OutOfMemoryError`` over the budget in the block."""
        with self._tracked(record=True) as tracker:
            yield tracker

    @contextmanager
    def training(self) -> Iterator[Meter]:
        """Enforce the budget within the block, and record no events."""
        with self._tracked(record=False) as tracker:
            yield tracker

    def compiler_missing(self) -> str | None:
        """Return that nothing is compiled here: torch compiles no model under a dispatch mode."""
        return "torch compiles nothing while the memory of a simulated GPU is counted"

    def why_not_expandable(self) -> str | None:
        """Return that segments are expandable already, if they are."""
        return "segments are expandable already" if self._config.expandable_segments else None

    def expandable(self) -> SimulatedDevice:
        """Return the same GPU with expandable segments."""
        other = copy.copy(self)
        other._config = replace(self._config, expandable_segments=True)
        return other

    def release(self) -> None:
        """Collect garbage that still holds tensors, and free what the running session has cached."""
        super().release()
        if self._session is not None:
            self._session.release()

    def _text(self, error: BudgetExceeded) -> str:
        profile = self._profile
        return cuda_oom_text(error, total_bytes=profile.total_bytes, context_bytes=context_bytes(profile))

    @contextmanager
    def _tracked(self, *, record: bool) -> Iterator[StorageMeter]:
        outer, self._session = self._session, self.new_allocator()
        try:
            with (
                StorageMeter(self._session, text=self._text, record=record) as tracker,
                tracker.noticing_resizes(),
            ):
                yield tracker
        finally:
            self._session = outer
