"""torch's CUDA allocator: its cap, its settings, the events that it records, and its readings.

It records every allocation and free with the requested size, workspaces of libraries included. So a run on a
GPU gives a `Trace`, as a run on the CPU does. A phase begins after as many events as torch's statistics count
at its mark. That is exact, which the times of the events are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from autobatch.core.units import MiB
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.allocator.trace import Trace, trace_of
from autobatch.device.base import Meter
from autobatch.device.oom import lost_context_ignored

MOST_EVENTS = 300_000
"""Most events of a recording. A longer one would lack its beginning. 25,000 are usual, and a snapshot makes a
Python object of each."""
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the allocator's options. The first that is set counts, even if empty
(c10/core/AllocatorConfig.cpp)."""
_UNMODELLED = (
    "max_split_size_mb",
    "roundup_power2_divisions",
    "roundup_bypass_threshold_mb",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
)
"""Options that change where the allocator puts blocks (c10/core/AllocatorConfig.h, torch 2.13)."""
TAKES_LOWEST = torch.__version__ < "2.13"
"""True if the lowest of equal blocks comes first, so that the order of the driver's segments counts. From
2.13 on, it is that of the oldest segment, wherever the driver has put it."""


@contextmanager
def capped(index: int, *, limit_bytes: int, total_bytes: int) -> Iterator[None]:
    """Cap the allocator of a GPU within the block, then restore the former cap."""
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(fraction_of(limit_bytes, total_bytes), index)
    try:
        yield
    finally:
        with lost_context_ignored():
            # A cap that was set in bytes is the smallest fraction that allows them.
            before = fraction_of(round(before * total_bytes), total_bytes)
            torch.cuda.set_per_process_memory_fraction(before, index)


def fraction_of(limit_bytes: int, total_bytes: int) -> float:
    """Return the smallest fraction of the memory that allows all bytes of the limit.

    The allocator multiplies and truncates. One byte less would lose a segment of a limit of whole segments.
    """
    fraction = min(limit_bytes / total_bytes, 1.0)
    while fraction < 1.0 and int(fraction * total_bytes) < limit_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def segments_fall(index: int) -> bool:
    """Return whether the driver puts each new segment below those before it; three of 20 MiB tell."""
    made = [torch.empty(20 * MiB, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in made]
    del made
    torch.cuda.empty_cache()
    return addresses == sorted(addresses, reverse=True)


def allocator_options(environ: Mapping[str, str]) -> str:
    """Return the options of the allocator in the environment: those of the first variable that is set."""
    text = next((environ[name] for name in _VARIABLES if name in environ), "")
    return text.replace(" ", "").lower()


def unmodelled_options(environ: Mapping[str, str]) -> list[str]:
    """Return the options in the environment with which `autobatch.device.allocator` is another allocator."""
    return re.findall(rf"\b({'|'.join(_UNMODELLED)})(?=:)", allocator_options(environ))


def free_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps, and the pinned host memory that torch keeps for copies."""
    for module, name in (
        (torch._C, "_cuda_clearCublasWorkspaces"),  # kept until torch 2.14
        (torch.accelerator, "empty_host_cache"),  # not in torch 2.11
    ):
        if hasattr(module, name):
            getattr(module, name)()


@contextmanager
def recording() -> Iterator[None]:
    """Record the events of the allocator within the block, without stacks, which cost more than they do."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_EVENTS)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class CudaMeter(Meter):
    """Readings of one session on a GPU. Peaks and retries count from its beginning.

    Args:
        waits: Whether readings wait until the GPU has finished its work, as in a probe.
        records: Whether the session is recorded.
    """

    def __init__(self, index: int, *, waits: bool = False, records: bool = False) -> None:
        self._index, self._waits, self._records = index, waits, records
        torch.cuda.reset_peak_memory_stats(index)
        # The flat dictionary takes 15 times as long, and a loop reads after every step.
        figures = torch.cuda.memory_stats_as_nested_dict(index)
        self._retries_before = figures["num_alloc_retries"]
        self._events_before = _count_events(figures) if records else 0
        self._marks: list[tuple[int, str]] = []
        self._modules: list[tuple[int, str]] = []

    def mark(self, phase: str) -> None:
        """Record that a phase begins, after the events so far."""
        self._note(self._marks, phase)

    def enter_module(self, name: str) -> None:
        """Record that a module's forward pass runs from here on; empty for none."""
        self._note(self._modules, name)

    def _note(self, notes: list[tuple[int, str]], name: str) -> None:
        if self._records:
            count = _count_events(torch.cuda.memory_stats_as_nested_dict(self._index))
            notes.append((count - self._events_before, name))

    def stats(self) -> MemoryStats:
        """Read the allocator, in bytes."""
        if self._waits:
            torch.cuda.synchronize(self._index)
        figures = torch.cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = figures["allocated_bytes"]["all"], figures["reserved_bytes"]["all"]
        return MemoryStats(
            allocated_bytes=allocated["current"],
            reserved_bytes=reserved["current"],
            peak_allocated_bytes=allocated["peak"],
            peak_reserved_bytes=reserved["peak"],
            retries=figures["num_alloc_retries"] - self._retries_before,
        )

    def trace(self) -> Trace | None:
        """Return the events since the session began; None if it records none, or no replay of them is right.

        None is right if the beginning is lost, or blocks are in a private pool, as those of CUDA graphs: it
        shares no block with the others.
        """
        if not self._records:
            return None
        snapshot = torch.cuda.memory._snapshot(self._index)
        entries = snapshot["device_traces"][self._index]
        is_private = any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in snapshot["segments"])
        is_cut = len(entries) >= MOST_EVENTS
        return None if is_private or is_cut else trace_of(entries, self._marks, self._modules)


def _count_events(figures: Mapping[str, Any]) -> int:
    """Return how many blocks the allocator has given and taken back since the process began."""
    active = figures["active"]["all"]
    return int(active["allocated"] + active["freed"])
