"""Readings of CUDA's caching allocator during a session, and the rules that refuse a step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from autobatch.core.units import format_bytes
from autobatch.device.allocator.ledger import MemoryStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autobatch.device.allocator.trace import Trace
    from autobatch.device.cuda_history import History


class CudaMeter:
    """Readings of one session on a GPU. Peaks and retries count from its beginning.

    Args:
        index: The GPU.
        history: The recording of the allocator. None in training, where no reading waits for the GPU.
    """

    def __init__(self, index: int, history: History | None = None) -> None:
        self._history = history
        self.phase = "setup"
        """The last phase passed to `mark`."""
        self._index = index
        torch.cuda.reset_peak_memory_stats(index)
        self._retries_before = self._retries()

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: the batch is on the GPU, and its allocator has counted it."""

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: what the host collates is not on the GPU."""
        return contextlib.nullcontext()

    def mark(self, phase: str) -> None:
        """Record that a phase begins; see `autobatch.step.train_step.Mark`."""
        self.phase = phase

    def stats(self) -> MemoryStats:
        """Read the allocator, in bytes. In a probe, wait for the GPU first."""
        if self._history is not None:
            torch.cuda.synchronize(self._index)
        figures = torch.cuda.memory_stats(self._index)
        return MemoryStats(
            allocated_bytes=figures["allocated_bytes.all.current"],
            reserved_bytes=figures["reserved_bytes.all.current"],
            peak_allocated_bytes=figures["allocated_bytes.all.peak"],
            peak_reserved_bytes=figures["reserved_bytes.all.peak"],
            retries=self._retries() - self._retries_before,
        )

    def trace(self) -> Trace | None:
        """Return the events that the allocator recorded; None in training, which records none."""
        return None if self._history is None else self._history.trace()

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._index)["num_alloc_retries"])


def why_refused(stats: MemoryStats, budget_bytes: int) -> str | None:
    """Return the rule that a finished step broke, in words; None if none.

    After a retry, memory was found only by returning the cache to the driver. Every later step would do the
    same, and take several times as long.
    """
    if stats.retries:
        return f"the allocator freed its cache {stats.retries} times to find memory"
    if stats.peak_reserved_bytes is not None and stats.peak_reserved_bytes > budget_bytes:
        return (
            f"the allocator held {format_bytes(stats.peak_reserved_bytes)}, over the budget of "
            f"{format_bytes(budget_bytes)}"
        )
    return None
