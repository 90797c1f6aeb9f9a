"""Traces of a step at single micro-batches, for a step whose memory depends on the values of its batches.

Packed sequences are an example: each batch has other lengths, so the sizes of allocations follow no rule in
the micro-batch. A trace that knows the lengths of a batch is exact for that batch. A few of them end at the
largest micro-batch that fits and the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import Trace, replay
from autobatch.footprint.fit_sizes import recorded
from autobatch.footprint.largest import largest_micro_batch
from autobatch.footprint.scratch import in_proportion
from autobatch.footprint.tracing.apart import run_apart
from autobatch.footprint.tracing.recording import Recording
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.workload.rng import preserved_random_state

FIRST_SIZE = 32
"""The first size to trace. A trace takes as long at any size, and small ones may take other steps."""
GLANCES = 2
"""Traces of the first step only, a third of the work, whose memory predicts the size of the next one."""
MOST_TRACES = 8
"""Sizes that are traced at most; two or three usually end the search."""


def trace_single_sizes(
    setting: Setting, new_allocator: Callable[[], Allocator], cap: int
) -> dict[int, Trace]:
    """Trace a step at a few micro-batches, up to the largest that fits and the next.

    The traces run in one copy of this process.

    Args:
        setting: what to trace.
        new_allocator: returns an empty allocator with the budget as its limit.
        cap: the largest micro-batch to try, at least 1.

    Returns:
        The trace of each size.

    Raises:
        Unpredictable: the step cannot be traced.
    """
    return {size: one.trace for size, one in record_single_sizes(setting, new_allocator, cap).items()}


def record_single_sizes(
    setting: Setting,
    new_allocator: Callable[[], Allocator],
    cap: int,
    *,
    known: Mapping[int, Recording] | None = None,
) -> dict[int, Recording]:
    """Do as `trace_single_sizes`, and return the recordings.

    Args:
        setting: what to trace.
        new_allocator: returns an empty allocator with the budget as its limit.
        cap: the largest micro-batch to try, at least 1.
        known: recordings of an earlier call, which are not made again.

    Raises:
        Unpredictable: the step cannot be traced.
    """
    setting = replace(setting, has_values=True)

    def search() -> dict[int, Recording]:
        made = dict(known or {})

        def trace_of(size: int, steps: int | None = None) -> Trace:
            if size in made:
                return made[size].trace
            with preserved_random_state():
                shortened = replace(setting, steps=setting.steps[:steps])
                one = recorded(shortened, size, setting.batch_of(size))
            if steps is None:
                made[size] = one
            return one.trace

        return {size: made[size] for size in closed_in(trace_of, new_allocator, cap)}

    return run_apart(search)


class TraceOf(Protocol):
    """A trace of a step at a micro-batch."""

    def __call__(self, size: int, steps: int | None = None) -> Trace:
        """Trace this many steps; all of them for None."""


def closed_in(trace_of: TraceOf, new_allocator: Callable[[], Allocator], cap: int) -> dict[int, Trace]:
    """Return the traces of sizes that close in on the largest that fits, by their size."""

    def in_proportion_to(size: int, trace: Trace) -> int:
        return largest_micro_batch(in_proportion(size, trace), new_allocator, cap)

    size = min(FIRST_SIZE, cap)
    for _ in range(GLANCES):
        size = max(in_proportion_to(size, trace_of(size, 1)), 1)
    traces: dict[int, Trace] = {}
    low, high = 0, cap + 1
    while len(traces) < MOST_TRACES:
        trace = traces[size] = trace_of(size)
        low, high = (size, high) if replay(trace, new_allocator()).fits else (low, size)
        if high - low == 1:
            break
        size = min(max(in_proportion_to(size, trace), low + 1), high - 1)
    return traces
