"""Machines that run micro-batches against a memory function, as the oracle of a search."""

from __future__ import annotations

from collections.abc import Callable

from autobatch.core.records import Attempt
from autobatch.device.trace import FREE, Trace
from autobatch.rehearsal.rehearsal import Outcome

BUDGET = 10_000
Rule = Callable[[int], int]
"""Bytes of a block at a micro-batch."""


def outcome_of(size: int, fits: bool, peak: int | None, trace: Trace | None = None) -> Outcome:
    """Return an attempt; its events are lost if it does not fit."""
    attempt = Attempt(
        micro_batch=size,
        fits=fits,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=None,
        seconds=0.0,
        reason=None if fits else "out of memory",
        phase=None if fits else "forward",
    )
    return Outcome(attempt, trace if fits else None)


class Machine:
    """Run micro-batches against a memory function, and keep the sizes that were run."""

    def __init__(self, memory: Callable[[int], int], trace: Callable[[int], Trace] | None = None) -> None:
        self.memory = memory
        self.trace = trace
        self.asked: list[int] = []

    def run(self, size: int) -> Outcome:
        self.asked.append(size)
        peak = self.memory(size)
        trace = self.trace(size) if self.trace else None
        return outcome_of(size, peak <= BUDGET, min(peak, BUDGET), trace)

    def fits(self, size: int) -> bool:
        return self.memory(size) <= BUDGET

    def limit(self, cap: int) -> int:
        """Return the largest size that fits, by brute force."""
        return max((size for size in range(1, cap + 1) if self.fits(size)), default=0)

    @property
    def ooms(self) -> int:
        return sum(not self.fits(size) for size in self.asked)


def trace_of(*rules: Rule) -> Callable[[int], Trace]:
    """Return the events of blocks that are allocated one after the other, of which two live at a time."""

    def trace(size: int) -> Trace:
        events: list[tuple[int, int]] = []
        for block, rule in enumerate(rules):
            events.append((block, rule(size)))
            if block:
                events.append((block - 1, FREE))
        return Trace(tuple(events), ((0, "forward"),))

    return trace


def memory_of(*rules: Rule) -> Rule:
    """Return the peak of the same blocks."""
    return lambda size: max(
        a + b for a, b in zip([r(size) for r in rules], [*(r(size) for r in rules[1:]), 0], strict=True)
    )


def machine_of(*rules: Rule) -> Machine:
    """Return a machine that records the events of its blocks."""
    return Machine(memory_of(*rules), trace_of(*rules))
