"""What memory is taken for at the peak of a trace, by purpose and by module."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import NamedTuple

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay

ACTIVATIONS = "activations"
DEPTH = 2
"""Parts of a module's name that an explanation keeps."""


class Explanation(NamedTuple):
    """Live bytes at the peak of a step."""

    phase: str
    """Phase of the peak."""
    by_kind: dict[str, int]
    """Bytes of parameters, gradients and so on, the largest first."""
    by_module: dict[str, int]
    """Bytes of activations by the module that made them, the largest first."""


def explain(trace: Trace) -> Explanation:
    """Explain the peak of a trace by the phase in which each block was taken, and by how long it lives."""
    outcome = replay(trace, CountingAllocator())
    ends: dict[int, int] = {}
    taken: dict[int, tuple[int, int]] = {}
    for at, (block, size) in enumerate(trace.events):
        if size == FREE:
            ends[block] = at
        elif at <= outcome.peak_at:
            taken[block] = at, size
    batches = _batches(trace)
    live = {
        block: one for block, one in taken.items() if ends.get(block, len(trace.events)) > outcome.peak_at
    }
    by_kind: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for block, (at, size) in live.items():
        kind = "batch" if at in batches else _kind(trace, at, ends.get(block, len(trace.events)))
        by_kind[kind] += size
        if kind == ACTIVATIONS:
            place = bisect_right(trace.modules, at, key=lambda one: one[0])
            module = trace.modules[place - 1][1] if place else ""
            by_module[".".join(module.split(".")[:DEPTH]) or "(the model itself)"] += size
    return Explanation(
        phase=outcome.peak_phase or "setup",
        by_kind=dict(by_kind.most_common()),
        by_module=dict(by_module.most_common()),
    )


def _batches(trace: Trace) -> set[int]:
    """Return the places of allocations in a row right before a forward pass, but for those of the model."""
    found: set[int] = set()
    for start, phase in trace.marks[2:]:
        at = start - 1
        while phase == "forward" and at >= 0 and trace.events[at][1] != FREE:
            found.add(at)
            at -= 1
    return found


def _kind(trace: Trace, taken_at: int, freed_at: int) -> str:
    """Return the purpose of a block."""
    taken, freed = (bisect_right(trace.marks, at, key=lambda mark: mark[0]) for at in (taken_at, freed_at))
    phase = trace.marks[taken - 1][1] if taken else "setup"
    if phase == "setup":
        return "parameters"
    if phase in ("forward", "loss"):
        return ACTIVATIONS
    if freed == taken and freed_at < len(trace.events):
        return "temporaries"
    return "gradients" if phase == "backward" else "optimizer state"
