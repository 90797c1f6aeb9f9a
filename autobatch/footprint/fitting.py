"""The sizes at which a program fits in a budget: by live bytes, then by replay in a model of the allocator.

Program ──live bytes──► bound ──replays──► m fits, and m + 1 does not
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autobatch.core.largest import largest
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.program import Polynomial, Program

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
        self.orders = orders
        self._new_allocator = new_allocator
        allocator = new_allocator()
        self._limit = allocator.limit
        self._only_counts = isinstance(allocator, CountingAllocator)
        self._live_peaks = [_live_peak(program.events) for program in orders]
        self._known: dict[int, bool] = {}

    def fits(self, m: int) -> bool:
        """Return whether a micro-batch fits."""
        if m not in self._known:
            self._known[m] = self._may_fit(m) and (
                self._only_counts
                or all(replay(program.at(m), self._new_allocator()).fits for program in self.orders)
            )
        return self._known[m]

    def largest(self, cap: int, multiple: int = 1) -> int:
        """Return a micro-batch up to ``cap`` that fits where the next one does not, 0 if none is found."""
        most, high = cap // multiple, 1
        while high <= most and self._may_fit(high * multiple):
            high *= 2
        bound = largest(lambda n: self._may_fit(n * multiple), high // 2, min(high, most + 1))
        if self._only_counts:
            return bound * multiple
        events = sum(len(program.events) for program in self.orders)
        single = max(0, bound - SCANNED_EVENTS // max(1, events))
        size, above = bound, bound + 1
        while size and not self.fits(size * multiple):
            above = size
            size -= 1 if size > single else max(1, size // STRIDE)
        return largest(lambda n: self.fits(n * multiple), size, above) * multiple

    def _may_fit(self, m: int) -> bool:
        """Return whether the live bytes fit, without which nothing does."""
        return self._limit is None or all(peak_at(m) <= self._limit for peak_at in self._live_peaks)


def _live_peak(events: Sequence[tuple[int, Polynomial | None]]) -> Callable[[int], int]:
    """Return a function of the micro-batch: the most bytes of known blocks that are live at the same time."""
    numbers: dict[Polynomial, int] = {}
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
