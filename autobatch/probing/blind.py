"""The next size of a search that no prediction guides, because memory is taken where no replay sees it.

Bisection fails at half of its sizes, and a failure is the dearest run. A search that may fail e more times
and run r more times tells at most Σ C(r, i) limits apart, i from 0 to e: the puzzle of dropping e eggs from a
building. The next size is the largest for which a failure leaves a puzzle that can be solved. The number of
runs allowed grows with the logarithm of the limit, so the steps upward grow too.
"""

from __future__ import annotations

from itertools import count

MOST_FAILURES = 5
"""Failures that a search may have, while that leaves a solution."""
SPARE_RUNS = 6
"""Runs that a search may have above the binary logarithm of its limit, while that leaves a solution."""


def next_size(low: int, high: int, *, runs: int, failures: int) -> int:
    """Return the size to run next, strictly between a size that fits and one that does not.

    Args:
        low: the largest that fits, at least 1.
        high: the smallest that does not, at least ``low + 2``.
        runs: runs of the search so far.
        failures: how many of them failed.
    """
    wanted = high - low
    allowed = max(MOST_FAILURES - failures, 1)
    if 2 * low < high and _reach(low, allowed, runs, wanted) < wanted:
        # Not every limit below ``high`` can be told in time, and small ones are as likely as large ones.
        return min(low + max(low, _reach(low, allowed - 1, runs + 1, wanted)), high - 1)
    for slack in count(-SPARE_RUNS):
        # With less time than allowed if that is enough; with more failures if nothing else is.
        left = allowed + max(slack, 0) // 4
        if _reach(low, left, runs - slack, wanted) >= wanted:
            below = _reach(low, left - 1, runs + 1 - slack, wanted)
            return low + min(below, wanted - 1)
    raise AssertionError("unreachable: more runs tell more limits apart")


def _reach(low: int, failures: int, runs: int, enough: int) -> int:
    """Return the number of limits from ``low`` on that can be told apart, at most ``enough``.

    Args:
        low: the largest size that fits so far.
        failures: failures that are still allowed.
        runs: runs so far.
        enough: where to stop counting.
    """
    if failures == 0 or enough <= 1 or runs >= low.bit_length() - 1 + SPARE_RUNS:
        return 1
    below = _reach(low, failures - 1, runs + 1, enough)
    if below >= enough:
        return enough
    return below + _reach(low + below, failures, runs + 1, enough - below)
