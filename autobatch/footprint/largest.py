"""The largest micro-batch at which a program fits in a budget.

Program ──live bytes──► bound ──replays──► m fits, and m + 1 does not
"""

from __future__ import annotations

from collections.abc import Callable

from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.live_bytes import LiveBytes
from autobatch.footprint.program import Program

_NEIGHBOURS = 16
"""Default number of sizes above the answer that `largest` tries: near the limit, a larger size may still fit
when a smaller one does not."""
_ROUNDS = 8
"""How often `largest` continues from such a larger size, because reserved memory can jump up and down."""


def largest(
    program: Program,
    make_allocator: Callable[[], Allocator],
    cap: int,
    *,
    other: Program | None = None,
    neighbours: int = _NEIGHBOURS,
) -> int | None:
    """Return the largest micro-batch whose replay fits, None if none is found.

    Reserved memory is not monotone in the micro-batch, so the search is limited. The answer m fits and m + 1
    does not. None of the next 16 sizes up to ``cap`` fits either, unless the search has continued from a
    larger size eight times. If fitting is monotone, as for a `CountingAllocator` and sizes that grow, m is
    the largest of all.

    A replay takes seconds for a step of very many allocations, and the count of live bytes does not. So that
    count bounds the answer, which is probably not far below.

    Args:
        program: the step.
        make_allocator: returns an empty allocator with the budget as its limit.
        cap: the largest micro-batch to try, at least 1.
        other: a second order of the same step, which must fit as well; None for no second order.
        neighbours: number of sizes above the answer to try.

    Raises:
        Untraceable: the program is invalid at a size that was tried.
    """
    known: dict[int, bool] = {}
    orders = [Fitting(order, make_allocator) for order in (program, other) if order is not None]

    def fits(m: int) -> bool:
        if m not in known:
            known[m] = all(order.fits(m) for order in orders)
        return known[m]

    low = last_fitting_below(fits, last_fitting(lambda m: all(order.may_fit(m) for order in orders), 0, cap))
    for _ in range(_ROUNDS):
        later = [m for m in range(low + 2, min(low + neighbours, cap) + 1) if fits(m)]
        if not later:
            break
        low = last_fitting(fits, later[-1], cap)
    return low or None


class Fitting:
    """The micro-batches at which a program fits in a budget: by live bytes if they decide, else by replay.

    Args:
        program: the step.
        make_allocator: returns an empty allocator with the budget as its limit.
    """

    def __init__(self, program: Program, make_allocator: Callable[[], Allocator]) -> None:
        self._program = program
        self._make_allocator = make_allocator
        allocator = make_allocator()
        self._limit = allocator.limit
        self._only_counts = isinstance(allocator, CountingAllocator)
        self._live = LiveBytes(program.events)

    def fits(self, m: int) -> bool:
        """Return whether it fits.

        Raises:
            Untraceable: the program is invalid at that size.
        """
        may_fit = self.may_fit(m)
        if self._only_counts or not may_fit:
            return may_fit
        return replay(self._program.at(m), self._make_allocator()).fits

    def may_fit(self, m: int) -> bool:
        """Return whether the live bytes fit, without which nothing does.

        Raises:
            Untraceable: the program is invalid at that size.
        """
        return self._limit is None or self._live.peak_at(m) <= self._limit


def last_fitting_below(fits: Callable[[int], bool], cap: int) -> int:
    """Return an m that fits while m + 1 does not or exceeds ``cap``, 0 if none does, from ``cap`` down."""
    if cap < 1 or fits(cap):
        return max(cap, 0)
    high, stride = cap, 1
    while high > stride and not fits(high - stride):
        high -= stride
        stride *= 2
    return _between(fits, max(0, high - stride), high)


def last_fitting(fits: Callable[[int], bool], low: int, cap: int) -> int:
    """Return an m >= ``low`` that fits while m + 1 does not or exceeds ``cap``; ``low`` fits or is 0."""
    stride = 1
    high = low + 1
    while high <= cap and fits(high):
        low = high
        stride *= 2
        high = min(low + stride, cap) if low < cap else cap + 1
    return _between(fits, low, high)


def _between(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return an m that fits while m + 1 does not, given that ``low`` fits or is 0, and ``high`` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
