"""A snapshot of real steps for pytorch.org/memory_viz."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.knobs import Value
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.footprint.memory_viz import dump
from autobatch.search.questions import ask_or_none
from autobatch.setup.attempt import attempt
from autobatch.setup.child import Session, SetupProcess
from autobatch.setup.setup import with_knobs
from autobatch.setup.trace import trace_footprint


def step_snapshot(process: SetupProcess, micro_batch: int, knobs: Mapping[str, Value]) -> bytes | None:
    """Run the steps of an attempt, and return the content of a file for the page.

    Args:
        process: holds the setup.
        micro_batch: samples of each micro-batch.
        knobs: the configuration.

    Returns:
        None if the steps do not fit, or the device records no allocations.
    """
    return ask_or_none(process, "recording the memory of a few steps", _snapshot, micro_batch, dict(knobs))


def _snapshot(session: Session, micro_batch: int, knobs: dict[str, Value]) -> bytes | None:
    setup = with_knobs(session.setup, knobs)
    outcome = attempt(setup, micro_batch)
    if outcome.trace is None or not outcome.attempt.fits:
        return None
    trace = outcome.trace.canonical()
    # The trace without memory knows purposes and modules, and is the same if its events are.
    step = trace_footprint(setup)
    labels = step.labels if step is not None and step.program.agrees_with(micro_batch, trace) else ()
    config = setup.device.allocator_config
    allocator: Allocator = CountingAllocator() if config is None else CachingAllocator(None, config)
    return dump(trace, allocator, labels)
