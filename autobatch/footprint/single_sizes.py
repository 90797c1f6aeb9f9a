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
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.fit import recorded
from autobatch.footprint.largest import Fitting
from autobatch.footprint.program import Polynomial, Program
from autobatch.footprint.tracing.apart import run_apart
from autobatch.footprint.tracing.trace_mode import Recording
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.workload.rng import preserved_random_state

FIRST_SIZE = 32
"""The first size to trace. A trace takes as long at any size, and small ones may take other steps."""
GLANCES = 2
"""Traces of the first step only, a third of the work, whose memory predicts the size of the next one."""
MOST_TRACES = 8
"""Sizes that are traced at most; two or three usually end the search."""


def record_single_sizes(
    setting: Setting,
    new_allocator: Callable[[], Allocator],
    cap: int,
    *,
    known: Mapping[int, Recording] | None = None,
) -> dict[int, Recording]:
    """Trace a step at a few micro-batches, up to the largest that fits and the next, in one copy.

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
        return Fitting([in_proportion(size, trace)], new_allocator).largest(cap)

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


def in_proportion(m: int, trace: Trace) -> Program:
    """Return a program whose blocks grow in proportion to the micro-batch, from one trace.

    Blocks of the size of one that the setup takes are constant: parameters, gradients, the optimizer's state.
    It serves for steps whose order of allocations depends on the values of the data, as that of packed
    sequences does.

    Args:
        m: the micro-batch of the trace.
        trace: the events of an attempt.
    """
    events = trace.canonical().events
    start = next((index for index, phase in trace.canonical().marks if phase != "setup"), 0)
    constant = {size for _, size in events[:start]}
    rules = {size: Polynomial(size) if size in constant else Polynomial(0, size, 0, m) for _, size in events}
    return Program(tuple((block, None if size == FREE else rules[size]) for block, size in events), ())
