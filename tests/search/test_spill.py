"""Sizes that spill to the host, rejected by their time per sample."""

from __future__ import annotations

from autobatch.core.records.probe import Attempt
from autobatch.search.spill import SpillGuard
from autobatch.setup.attempt import Outcome


def judged(guard: SpillGuard, size: int, seconds: float) -> Attempt:
    ran = Attempt(
        micro_batch=size,
        fits=True,
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        seconds=1.0,
        step_seconds=seconds,
    )
    return guard.judge(Outcome(ran, None)).attempt


RAN = [(100, 1.0), (10, 0.9), (200, 2.0), (201, 7.0), (150, 5.0)]


def test_a_smaller_size_that_is_slower_per_sample_is_not_rejected() -> None:
    """Costs per step weigh more in a smaller size, but cannot slow a larger one."""
    guard = SpillGuard(active=True)
    assert [judged(guard, *one).fits for one in RAN] == [True, True, True, False, True]


def test_the_reason_names_the_factor_and_a_device_that_cannot_spill_rejects_nothing() -> None:
    guard = SpillGuard(active=True)
    judged(guard, 100, 1.0)
    assert "4.0 times" in str(judged(guard, 200, 8.0).reason)
    idle = SpillGuard(active=False)
    assert all(judged(idle, *one).fits for one in RAN)
