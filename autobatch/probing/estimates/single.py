"""Prediction of a step that follows no rule in the micro-batch, from traces at single sizes.

Each trace is exact for its size. Between them, the step is taken to grow in proportion.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import NamedTuple

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import BudgetExceeded
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.footprint.fit_sizes import Unpredictable
from autobatch.footprint.predict import (
    Footprint,
    Prediction,
    footprint_of,
    gpu_allocator,
    predict,
    why_untrusted,
)
from autobatch.footprint.program import Program
from autobatch.footprint.scratch import in_proportion
from autobatch.footprint.tracing.recording import Recording
from autobatch.probing.estimates.traces import Traces


class SinglePrediction(NamedTuple):
    """A prediction, and the footprint that is exact for it."""

    step: Footprint
    found: Prediction


def predict_single(
    traces: Traces, gpu: HardwareProfile, *, budget_bytes: int, cap: int, micro_batch: int | None
) -> SinglePrediction:
    """Predict the largest micro-batch that fits, or a given one.

    Args:
        traces: of the workload.
        gpu: the GPU.
        budget_bytes: bytes that the allocator may hold.
        cap: the largest micro-batch to try.
        micro_batch: predict this size in place of the largest.

    Raises:
        Unpredictable: the step cannot be traced at a single size either.
    """
    reason = why_untrusted()
    if reason:
        raise Unpredictable(f"cannot predict: {reason}")
    limit = None if micro_batch is not None else budget_bytes
    recordings = traces.at_single_sizes(
        gpu.compute_capability, partial(_allocator, limit, gpu.workspaces), micro_batch or cap
    )
    tried = sorted(recordings) if micro_batch is None else [micro_batch]
    made = {}
    for m in reversed(tried):
        step = made[m] = _footprint(m, recordings[m])
        found = predict(step, budget_bytes=budget_bytes, cap=m, micro_batch=m, libraries=gpu.libraries)
        if found.fits or micro_batch is not None:
            above = [other for other in tried if other > m]
            return SinglePrediction(step, found._replace(micro_batch_high=above[0] - 1 if above else m))
    least = Prediction(0, 0, 0, fits=False, outcome=found.outcome)
    return SinglePrediction(made[tried[0]], least)


def _allocator(limit: int | None, workspaces: tuple[int, int] | None) -> CachingAllocator:
    """Return an allocator that holds the workspaces of libraries, as far as the limit allows."""
    allocator = gpu_allocator(limit)
    size, count = workspaces or (0, 0)
    with suppress(BudgetExceeded):
        for _ in range(count):
            allocator.malloc(size)
    return allocator


def _footprint(micro_batch: int, recording: Recording) -> Footprint:
    """Return a footprint that is exact at the size of a recording."""
    events = in_proportion(micro_batch, recording.trace).events
    return footprint_of(Program(events, recording.trace.canonical().marks), recording)
