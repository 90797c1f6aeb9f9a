"""The peak of an attempt, and the room that it leaves in the budget."""

from __future__ import annotations

from autobatch.core.records.probe import Attempt

AMPLE_ROOM = 0.8
"""Share of the budget below which a predicted peak leaves so much room that a cached limit is in doubt."""


def has_ample_room(attempt: Attempt, budget_bytes: int) -> bool:
    """Return whether the peak of a size that fits leaves room for far more than one sample more.

    Memory has a fixed part, so one sample more takes at most ``peak ÷ micro_batch``. At a true limit the sum
    therefore exceeds the budget, but for workspaces and fragments.
    """
    peak = peak_bytes(attempt)
    return peak is not None and peak + peak / attempt.micro_batch < AMPLE_ROOM * budget_bytes


def peak_bytes(attempt: Attempt) -> int | None:
    """Return the peak that the budget limits: reserved, or allocated if the device caches nothing."""
    if attempt.peak_reserved_bytes is not None:
        return attempt.peak_reserved_bytes
    return attempt.peak_allocated_bytes
