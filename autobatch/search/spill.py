"""Sizes that run, but in the host's memory."""

from __future__ import annotations

import msgspec

from autobatch.setup.attempt import Outcome

SPILL_FACTOR = 3.0
"""A size that takes this much longer per sample than the fastest does not run in the GPU's own memory."""


class SpillGuard:
    """Reject sizes that run several times slower per sample: some drivers spill to the host's memory.

    Only sizes larger than those that ran well are rejected. Smaller ones are slower per sample for what comes
    once a step, such as a loss over the whole batch.

    Args:
        active: whether this device's driver may spill.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._best: float | None = None
        self._largest = 0

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome, changed to one that does not fit if the size spilled."""
        attempted = outcome.attempt
        if not (self._active and attempted.fits and attempted.step_seconds):
            return outcome
        per_sample = attempted.step_seconds / attempted.micro_batch
        is_larger = attempted.micro_batch > self._largest
        if self._best is None or not is_larger or per_sample <= SPILL_FACTOR * self._best:
            self._best = per_sample if self._best is None else min(self._best, per_sample)
            self._largest = max(self._largest, attempted.micro_batch)
            return outcome
        reason = (
            f"it runs at {per_sample / self._best:.1f} times the best time per sample: the driver seems to "
            "spill to the host's memory instead of failing"
        )
        return Outcome(msgspec.structs.replace(attempted, fits=False, reason=reason), None)
