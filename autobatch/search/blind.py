"""The next size of a search that no prediction guides, because memory is taken where no replay sees it.

Bisection fails at half of its sizes, and a failure is the dearest run. A search that may fail e more times
and run r more times tells at most Σ C(r, i) limits apart, i from 0 to e: the puzzle of dropping e eggs from a
building. The next size is the largest for which a failure leaves a puzzle that can be solved. The number of
runs allowed grows with the logarithm of the limit, so the steps upward grow too.

After the usual three runs, one of which failed, no search can tell more than 444 limits apart within 5
failures and 6 runs above the binary logarithm. So both allowances grow for limits from 256 on.
"""

from __future__ import annotations

from itertools import count
from math import comb

MOST_FAILURES = 5
"""Failures that a search for a limit below 256 may have, while that leaves a solution."""
SPARE_RUNS = 6
"""Runs that it may have above the binary logarithm of its limit, while that leaves a solution."""
TOLD_APART = 7
"""Binary logarithm of the limit from which on both allowances grow."""


def most_runs(limit: int) -> int:
    """Return the runs that a search may take for a limit: from 256 on, two more for each doubling."""
    doublings = limit.bit_length() - 1
    return doublings + SPARE_RUNS + 2 * max(0, doublings - TOLD_APART)


def most_failures(limit: int) -> int:
    """Return the failures that a search may have for a limit: from 256 on, one more for three doublings."""
    return MOST_FAILURES + (max(0, limit.bit_length() - 1 - TOLD_APART) + 2) // 3


def next_size(low: int, high: int, *, runs: int, failures: int) -> int:
    """Return the size to run next, strictly between a size that fits and one that does not.

    Args:
        low: the largest that fits, at least 1.
        high: the smallest that does not, at least ``low + 2``.
        runs: runs of the search so far.
        failures: how many of them failed.
    """
    wanted = high - low
    if 2 * low < high and _reach(low, failures, runs, wanted) < wanted:
        # Not every limit below ``high`` can be told in time, and small ones are as likely as large ones.
        return min(low + max(low, _reach(low, failures + 1, runs + 1, wanted)), high - 1)
    for slack in count(-SPARE_RUNS):
        # With less time than allowed if that is enough; with more failures if nothing else is.
        failed = min(failures, most_failures(low) - 1) - max(slack, 0) // 4
        if _reach(low, failed, runs - slack, wanted) >= wanted:
            below = _reach(low, failed + 1, runs + 1 - slack, wanted)
            return low + min(below, wanted - 1)
    raise AssertionError("unreachable: more runs tell more limits apart")


def _reach(low: int, failures: int, runs: int, enough: int) -> int:
    """Return the number of limits from ``low`` on that can be distinguished, at most ``enough``.

    Args:
        low: the largest size that fits so far.
        failures: failures so far.
        runs: runs so far.
        enough: where to stop counting.
    """
    left, more = most_failures(low) - failures, most_runs(low) - runs
    if left <= 0 or more <= 0 or enough <= 1:
        return 1
    alike = sum(comb(more, number) for number in range(left + 1))
    if (low + min(alike, enough)).bit_length() == low.bit_length():
        return min(alike, enough)
    below = _reach(low, failures + 1, runs + 1, enough)
    if below >= enough:
        return enough
    return below + _reach(low + below, failures, runs + 1, enough - below)
