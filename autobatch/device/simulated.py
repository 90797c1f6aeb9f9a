"""A card that is not here: real CPU tensors through the model of CUDA's caching allocator, with that card's
budget.

Out-of-memory errors, recovery and fragmentation can be exercised with no card. The limit is always on, in
training as well. What is not simulated: the card's operators. Kernels, autocast lists and workspaces are the
CPU's, so a micro-batch found here is not the card's (`autobatch.footprint.predict` is for that).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from autobatch.core.records import DeviceRecord
from autobatch.core.units import MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import BudgetExceeded, MemoryStats, cuda_oom_text
from autobatch.device.allocator.tracker import StorageMeter
from autobatch.device.base import Meter
from autobatch.device.budget import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.cpu_operators import CpuOperators
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


class SimulatedDevice(CpuOperators):
    """A card of a hardware profile, simulated on the CPU.

    Args:
        profile: the card.
        memory_budget: taken at its word: a size, or a share of the card. ``None``: all of it, less the
        context
            and a headroom.
        expandable_segments: how the allocator grows (``expandable_segments:True``); no environment is read.

    Raises:
        InputError: the budget is no size, or over the card's memory.
        DoesNotFitError: the card is smaller than its context and the headroom.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        memory_budget: str | int | None = None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        self._profile = profile
        self._budget_bytes, self._budget_source = simulated_budget(profile, memory_budget)
        self._config = AllocatorConfig(expandable_segments=expandable_segments)
        self._session: CachingAllocator | None = None

    @property
    def kind(self) -> str:
        """``sim``."""
        return "sim"

    @property
    def budget_bytes(self) -> int:
        """What the allocator may hold: reserved bytes, cached blocks included."""
        return self._budget_bytes

    @property
    def allocator_config(self) -> AllocatorConfig:
        """Settings of the allocator that is simulated."""
        return self._config

    def new_allocator(self) -> CachingAllocator:
        """An empty allocator with the budget, to replay in."""
        return CachingAllocator(self._budget_bytes, self._config)

    def describe(self) -> DeviceRecord:
        """Name, total and budget of the card."""
        return DeviceRecord(
            kind=self.kind,
            name=f"{self._profile.title} (simulated)",
            total_bytes=self._profile.total_bytes,
            budget_bytes=self._budget_bytes,
            budget_source=self._budget_source,
            other_processes_bytes=0,
            notes=["simulated: CPU tensors in a model of CUDA's caching allocator; no speed is the card's"],
        )

    @contextmanager
    def enforced(self) -> Iterator[Meter]:
        """Inside, a step that outgrows the budget raises an error; starts from nothing cached."""
        with self._tracked(record=True) as tracker:
            yield tracker

    @contextmanager
    def training(self) -> Iterator[Meter]:
        """The same, without a record of the events."""
        with self._tracked(record=False) as tracker:
            yield tracker

    def why_not_expandable(self) -> str | None:
        """Nothing, unless it is so already."""
        return "segments are expandable already" if self._config.expandable_segments else None

    def expandable(self) -> SimulatedDevice:
        """The same card with expandable segments."""
        other = copy.copy(self)
        other._config = replace(self._config, expandable_segments=True)
        return other

    def refuses(self, stats: MemoryStats) -> str | None:
        """Nothing: a step that got through, be it by giving cached segments back, fits."""
        return None

    def release(self) -> None:
        """Collect garbage that still holds tensors; give back what the running session has cached."""
        gc.collect()
        if self._session is not None:
            self._session.release()

    def _text(self, error: BudgetExceeded) -> str:
        profile = self._profile
        return cuda_oom_text(error, total_bytes=profile.total_bytes, context_bytes=context_bytes(profile))

    @contextmanager
    def _tracked(self, *, record: bool) -> Iterator[StorageMeter]:
        outer, self._session = self._session, self.new_allocator()
        try:
            with StorageMeter(self._session, text=self._text, record=record) as tracker:
                yield tracker
        finally:
            self._session = outer
