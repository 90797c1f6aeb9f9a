"""The largest micro-batch of a footprint in a budget, its peak, and the interval around it.

    live bytes in the budget ≥ replay in the budget ≥ replay in the budget less the margin

Without fragmentation no more than the first fits, so that is the upper end. No trace shows what libraries
hold beside the tensors. The workspaces of cuBLAS are counted, and the lower end leaves a margin for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

from autobatch.core.units import KiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import Replay, replay
from autobatch.estimates.footprints import Footprint, Unpredictable
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Untraceable

Outcome: TypeAlias = tuple[int, int]
"""The largest micro-batch, 0 if none fits, and its peak (that of 1 if 0)."""


class Prediction(NamedTuple):
    """The largest micro-batch that fits."""

    micro_batch: int
    """The largest that is predicted to fit, 0 if none does; or the requested one."""
    low: int
    """The largest in the budget less the margin."""
    high: int
    """The largest without fragmentation."""
    fits: bool
    """True if ``micro_batch`` fits."""
    outcome: Replay
    """Replay at ``micro_batch`` (at 1 if that is 0), without a limit if it does not fit."""


class Spending(NamedTuple):
    """A budget, and the sizes to spend it on."""

    budget_bytes: int
    new_allocator: Callable[[int | None, bool], Allocator]
    """Returns an empty allocator with a limit, None for no limit; with expandable segments if True."""
    cap: int
    """The largest micro-batch to try."""
    can_expand: bool = True
    """True if segments can be expandable, and are not yet."""
    held_bytes: int = 0
    """Bytes that each allocator of ``new_allocator`` begins with."""

    def largest(self, step: Footprint, *, expandable: bool = False) -> Outcome:
        """Return what fits of a step, and its peak.

        Raises:
            Untraceable: its footprint is invalid at a size that was tried.
        """
        size = self._most(step, partial(self.new_allocator, self.budget_bytes, expandable), self._cap(step))
        # If a size fits only after the cache is emptied, the peak is the one within the budget.
        limit = self.budget_bytes if size else None
        peaks = replay(step.program.at(max(1, size)), self.new_allocator(limit, expandable))
        reserved = peaks.peak_reserved_bytes
        return size, peaks.peak_allocated_bytes if reserved is None else reserved

    def predict(self, step: Footprint, micro_batch: int | None = None) -> Prediction:
        """Predict what fits of a step, or whether one size does.

        Raises:
            Unpredictable: its footprint is invalid at a size that was tried.
        """
        less, cap = int(self.budget_bytes * (1 - step.margin)), self._cap(step)
        try:
            # Each limits the next: if the live bytes alone exceed the budget, no allocator fits them.
            high = self._most(step, partial(CountingAllocator, self.budget_bytes - self.held_bytes), cap)
            best = self._most(step, partial(self.new_allocator, self.budget_bytes, False), high)
            low = self._most(step, partial(self.new_allocator, less, False), best)
            asked = best if micro_batch is None else micro_batch
            trace = step.program.at(max(1, asked))
            outcome = replay(trace, self.new_allocator(self.budget_bytes, False))
            fits = outcome.fits and asked > 0
            if not outcome.fits:
                outcome = replay(trace, self.new_allocator(None, False))
        except Untraceable as error:
            raise Unpredictable(f"cannot predict: {error}") from error
        return Prediction(asked, low, high, fits, outcome)

    def _cap(self, step: Footprint) -> int:
        return self.cap if step.only is None else step.only

    def _most(self, step: Footprint, new_allocator: Callable[[], Allocator], cap: int) -> int:
        return Fitting([step.program], new_allocator).largest(cap, step.only or step.multiple)


def gpu_allocator(limit: int | None, expandable: bool = False, *, held_bytes: int = 0) -> CachingAllocator:
    """Return a model of a GPU's allocator that holds so many bytes.

    As on the GPU itself, a step does not fit if the allocator has to empty its cache to find memory for it:
    each later step would do so too, and take several times as long.
    """
    config = AllocatorConfig(expandable_segments=expandable, held_bytes=held_bytes, retries=False)
    return CachingAllocator(limit, config)


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of the workspaces of cuBLAS, one for the forward and one for the backward pass.

    The sizes are torch's defaults of ``CUBLAS_WORKSPACE_CONFIG``: ``:4096:2:16:8``, and ``:4096:8`` from
    compute capability 9.0 on, in KiB times their number (notes/cuda, "cuBLAS workspaces").
    """
    return 2 * KiB * (4096 * 8 if capability >= (9, 0) else 4096 * 2 + 16 * 8)
