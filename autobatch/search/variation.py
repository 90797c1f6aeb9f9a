"""Memory that varies at random: equal micro-batches that allocate different amounts."""

from __future__ import annotations

from autobatch.device.allocator.trace import FREE, Trace
from autobatch.setup.attempt import ATTEMPT_STEPS


def variation_of(trace: Trace) -> float | None:
    """Return the share by which equal micro-batches of an attempt differ in what they allocate.

    All micro-batches of an attempt have the same samples. Those of its later steps do the same work, so they
    differ only if the data or the model draw at random, or depend on weights that have changed.

    Returns:
        None if they do not differ, or if the events have no phases.
    """
    allocated = _allocated(trace)
    if len(allocated) != sum(ATTEMPT_STEPS):
        return None
    _, first, second = ATTEMPT_STEPS
    pairs = zip(allocated[-first - second : -second], allocated[-second:], strict=True)
    return max(max(pair) / max(min(pair), 1) - 1 for pair in pairs) or None


def _allocated(trace: Trace) -> list[int]:
    """Return the bytes that each micro-batch allocates, in its forward and backward pass."""
    starts = [position for position, phase in trace.marks if phase == "forward"]
    ends = [position for position, phase in trace.marks if phase in ("forward", "optimizer")]
    return [
        sum(size for _, size in trace.events[start : min(end for end in ends if end > start)] if size != FREE)
        for start in starts
    ]
