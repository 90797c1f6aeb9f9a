"""Sizes that close in on the largest that fits, against brute force."""

from __future__ import annotations

import pytest

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.single_sizes import closed_in

LENGTHS = [7 + 13 * number % 24 for number in range(400)]


def trace(size: int, steps: int | None = None) -> Trace:
    """Return blocks as long as the sequences are; a first step holds no gradients."""
    own = LENGTHS[:size]
    held = [900] if steps else [900, 400]
    taken = [*held, *(30 * sum(length > at for length in own) for at in range(max(own)))]
    blocks = list(enumerate(taken))
    events = (*blocks, *((number, FREE) for number, _ in blocks[len(held) :]), (len(blocks), 1))
    return Trace(tuple(events), ((len(held), "forward"),)).canonical()


@pytest.mark.parametrize("budget", [1_400, 1_600, 2_100, 9_000, 60_000, 144_000, 10**9])
def test_the_largest_that_fits_is_traced_with_the_next(budget: int) -> None:
    def needed(size: int) -> int:
        return 1_300 + 30 * sum(LENGTHS[:size])

    true = max(size for size in range(401) if needed(size) <= max(budget, 1_300))
    found = closed_in(trace, lambda: CountingAllocator(budget), 400)
    # Nothing fits at all, all that there is fits, or the next size does not.
    expected = {1} if true == 0 else {400} if true == 400 else {true, true + 1}
    assert expected <= set(found)
    assert len(found) <= 5
    assert all(trace(size) == one for size, one in found.items())
