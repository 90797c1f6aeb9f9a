"""Prediction of a step's memory, and of the largest micro-batch that fits, without running it.

    Program ──live bytes──► bound ──replays──► m fits, and m + 1 does not

A prediction for another GPU takes milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from autobatch.core.largest import halving, largest
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import Replay, replay
from autobatch.device.cuda_allocator import FUSED_WORKSPACE_BYTES, WorkspaceRule, workspace_rule
from autobatch.device.profiles import Libraries
from autobatch.footprint.fit import Footprint, Unpredictable
from autobatch.footprint.program import Program, Rule, Untraceable

SCANNED_EVENTS = 200_000
"""Allocations and frees that are replayed below the bound, size after size, which takes half a second."""
STRIDE = 32
"""Further sizes are tried in steps of one part in this many."""


class Fitting:
    """The micro-batches at which all orders of a step fit in a budget: by live bytes, then by replay.

    What fits need not be monotone in a caching allocator, so all sizes below the bound of the live bytes are
    replayed until one fits, which is then the largest of all. If none does within `SCANNED_EVENTS`, the rest
    is searched in larger steps.

    Args:
        orders: programs of the step, each with its own order of micro-batches and steps.
        new_allocator: returns an empty allocator with the budget as its limit.
    """

    def __init__(self, orders: Sequence[Program], new_allocator: Callable[[], Allocator]) -> None:
        self._orders = orders
        self._new_allocator = new_allocator
        allocator = new_allocator()
        self._limit = allocator.limit
        self._only_counts = isinstance(allocator, CountingAllocator)
        self._live_peaks = [_live_peak(program.events) for program in orders]
        self._known: dict[int, bool] = {}

    def fits(self, m: int) -> bool:
        """Return whether a micro-batch fits.

        Raises:
            Untraceable: a program is invalid at that size.
        """
        if m not in self._known:
            self._known[m] = self._may_fit(m) and (
                self._only_counts
                or all(replay(program.at(m), self._new_allocator()).fits for program in self._orders)
            )
        return self._known[m]

    def largest(self, cap: int, multiple: int = 1) -> int:
        """Return a micro-batch up to ``cap`` that fits where the next one does not, 0 if none is found.

        Args:
            cap: the largest micro-batch to try.
            multiple: try multiples of this number only.

        Raises:
            Untraceable: a program is invalid at a size that was tried.
        """

        def may_fit(count: int) -> bool:
            return self._may_fit(count * multiple)

        def fits(count: int) -> bool:
            return self.fits(count * multiple)

        most, high = cap // multiple, 1
        while high <= most and may_fit(high):
            high *= 2
        bound = largest(may_fit, high // 2, min(high, most + 1), halving)
        if self._only_counts:
            return bound * multiple
        events = sum(len(program.events) for program in self._orders)
        single = max(0, bound - SCANNED_EVENTS // max(1, events))
        size, above = bound, bound + 1
        while size and not fits(size):
            above = size
            size -= 1 if size > single else max(1, size // STRIDE)
        return largest(fits, size, above, halving) * multiple

    def _may_fit(self, m: int) -> bool:
        """Return whether the live bytes fit, without which nothing does."""
        return self._limit is None or all(peak_at(m) <= self._limit for peak_at in self._live_peaks)


def _live_peak(events: Sequence[tuple[int, Rule | None]]) -> Callable[[int], int]:
    """Return a function of the micro-batch: the most bytes that are live at the same time.

    Args:
        events: of a program. Frees of unknown blocks are left out.
    """
    numbers: dict[Rule, int] = {}
    held: dict[int, int] = {}
    changes: list[int] = []
    """The number of a rule, from 1, with the sign of what happens to a block of its size."""
    for block, rule in events:
        if rule is not None:
            held[block] = numbers.setdefault(rule, len(numbers) + 1)
            changes.append(held[block])
        elif block in held:
            changes.append(-held.pop(block))
    signed = np.array(changes, dtype=np.intp)
    places, signs = np.abs(signed), np.sign(signed)

    def peak_at(m: int) -> int:
        sizes = np.array([0, *(rule.at(m) for rule in numbers)], np.int64)
        return int(np.cumsum(sizes[places] * signs).max(initial=0))

    return peak_at


class Prediction(NamedTuple):
    """The largest micro-batch that fits on a GPU."""

    micro_batch: int
    """The largest that is predicted to fit, 0 if none does; or the requested one."""
    micro_batch_low: int
    """The largest within the budget less the margin, wherever the driver puts segments."""
    micro_batch_high: int
    """The largest without fragmentation."""
    fits: bool
    """True if ``micro_batch`` fits."""
    outcome: Replay
    """Replay at ``micro_batch`` (at 1 if that is 0), without a limit if it does not fit."""


def predict(
    step: Footprint,
    *,
    budget_bytes: int,
    cap: int,
    micro_batch: int | None = None,
    libraries: Libraries | None = None,
) -> Prediction:
    """Predict the largest micro-batch that fits in a budget.

    Args:
        step: the footprint.
        budget_bytes: bytes that the allocator may hold.
        cap: the largest micro-batch to try.
        micro_batch: predict this size in place of the largest.
        libraries: of the GPU; None to leave them out.

    Raises:
        Unpredictable: the footprint is invalid at a size that was tried.
    """
    program = program_on(step, libraries)

    def most(new_allocator: Callable[[], Allocator], cap: int) -> int:
        return Fitting([program], new_allocator).largest(cap, step.multiple)

    try:
        # Each limits the next: if the live bytes alone exceed the budget, no allocator fits them.
        high = most(partial(CountingAllocator, budget_bytes), cap)
        best = most(partial(gpu_allocator, budget_bytes), high)
        # The driver decides where segments lie: each above those before it, or below them.
        less = int(budget_bytes * (1 - step.margin))
        low = min(most(partial(gpu_allocator, less, falls=falls), best) for falls in (False, True))
        asked = best if micro_batch is None else micro_batch
        trace = program.at(max(1, asked))
        outcome = replay(trace, gpu_allocator(budget_bytes))
        fits = outcome.fits and asked > 0
        if not outcome.fits:
            outcome = replay(trace, gpu_allocator(None))
    except Untraceable as error:
        raise Unpredictable(f"cannot predict: {error}") from error
    return Prediction(asked, low, high, fits, outcome)


def gpu_allocator(limit: int | None, expandable: bool = False, *, falls: bool = False) -> CachingAllocator:
    """Return an empty model of a GPU's allocator.

    As on the GPU itself, a step does not fit if the allocator has to empty its cache to find memory for it:
    each later step would do so too, and take several times as long.
    """
    return CachingAllocator(
        limit, AllocatorConfig(expandable_segments=expandable, retries=False, falls=falls)
    )


def program_on(step: Footprint, libraries: Libraries | None, *, rule: WorkspaceRule | None = None) -> Program:
    """Return the program of a step on a GPU: with cuBLAS workspaces, and the scratch of its reductions.

    Args:
        step: the footprint.
        libraries: of the GPU; None for no workspaces, and the usual processors.
        rule: for the workspaces; None for that of this torch.
    """
    if libraries is None:
        return step.program
    program = step.program.on(libraries.processors)
    if libraries.workspaces is None:
        return program
    size = libraries.workspaces[0]
    rule = rule or workspace_rule(str(torch.__version__), os.environ)
    if rule == "freed":
        taken = [(one.at, FUSED_WORKSPACE_BYTES if one.is_fused else size) for one in step.products]
        return program.with_blocks(taken, are_freed=True)
    # The first product of a thread takes the workspace of that thread.
    first: dict[tuple[bool, int], int] = {}
    for one in step.products:
        first.setdefault((one.is_backward, size), one.at)
        if one.is_fused and rule == "apart":
            first.setdefault((one.is_backward, FUSED_WORKSPACE_BYTES), one.at)
    return program.with_blocks([(at, taken) for (_, taken), at in first.items()], are_freed=False)
