"""Explanations of a step's memory from its events: the peak by purpose and module, and the course.

The purpose of a block follows from the phase in which it was taken, and from how long it lives. So the events
of a real run are explained like those of a prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from autobatch.core.records import MemoryCurve
from autobatch.core.text import module_in_words
from autobatch.core.units import format_bytes
from autobatch.device.allocator import Allocator
from autobatch.device.trace import FREE, Trace, replay

MODULES = 3
"""Modules that an explanation names."""
DEPTH = 2
"""Parts of a module's name that an explanation and a chart keep."""
MOST_POSITIONS = 300
"""Events of a step that a chart keeps."""
ACTIVATIONS = "activations"
KINDS = ("parameters", "optimizer state", "gradients", "batch", ACTIVATIONS, "temporaries")
"""Kinds of memory from the bottom of a chart upwards, in the order of how long they stay."""
MOST_PARTS = 6
"""Parts of the model that a chart tells apart, all that are smaller among them."""
OTHER_PARTS = "all else"
CACHED = "cached"
"""Memory that the allocator holds without any tensor in it."""


class Label(NamedTuple):
    """The purpose of a block."""

    kind: str
    """One of `KINDS`."""
    part: str
    """The part of the model that took an activation: the first parts of the module's dotted name; empty for
    none."""


def labels_of(trace: Trace) -> dict[int, Label]:
    """Return the purpose of each block of a trace, whose blocks have numbers of their own."""
    freed_at = {block: at for at, (block, size) in enumerate(trace.events) if size == FREE}
    batches = set[int]()
    for start, phase in trace.marks[2:]:  # allocations in a row right before a forward pass
        at = start - 1
        while phase == "forward" and at >= 0 and trace.events[at][1] != FREE:
            batches.add(at)
            at -= 1
    labels = {}
    for at, (block, size) in enumerate(trace.events):
        if size == FREE:
            continue
        phase, end = trace.phase_at(at) or "setup", freed_at.get(block, len(trace.events))
        kind, part = "gradients" if phase == "backward" else "optimizer state", ""
        if at in batches:
            kind = "batch"
        elif phase == "setup":
            kind = "parameters"
        elif phase in ("forward", "loss"):
            place = bisect_right(trace.modules, at, key=lambda entry: entry[0])
            kind, module = ACTIVATIONS, trace.modules[place - 1][1] if place else ""
            part = ".".join(module.split(".")[:DEPTH])
        elif end < len(trace.events) and not any(at < mark <= end for mark, _ in trace.marks):
            kind = "temporaries"
        labels[block] = Label(kind, part)
    return labels


class Explanation(NamedTuple):
    """Live bytes at the peak of a step."""

    peak_bytes: int
    """Peak of live tensors, without rounding and fragmentation."""
    phase: str
    """Phase of the peak."""
    by_kind: dict[str, int]
    """Bytes of parameters, gradients and so on, the largest first."""
    by_module: dict[str, int]
    """Bytes of activations by the module that made them, the largest first."""

    def text(self) -> str:
        """Write the explanation in one line."""
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.by_kind.items() if size)
        top = [
            f"`{module_in_words(name)}` {format_bytes(size)}"
            for name, size in list(self.by_module.items())[:MODULES]
            if size
        ]
        modules = f" (most activations in {', '.join(top)})" if len(self.by_module) > 1 else ""
        held = f": {parts}{modules}" if parts else ""
        return f"{format_bytes(self.peak_bytes)} at the peak in the {self.phase}{held}"


def explain(trace: Trace) -> Explanation:
    """Explain the peak of a trace, or the end of one that ran out of memory there."""
    outcome = replay(trace, Allocator())
    labels = labels_of(trace)
    by_kind: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for block, size in trace.live_after(outcome.peak_at).items():
        kind, part = labels[block]
        by_kind[kind] += size
        if kind == ACTIVATIONS:
            by_module[part or "(the model itself)"] += size
    return Explanation(
        peak_bytes=outcome.peak_allocated_bytes,
        phase=trace.phase_at(outcome.peak_at) or "setup",
        by_kind=dict(by_kind.most_common()),
        by_module=dict(by_module.most_common()),
    )


def memory_curve(trace: Trace, micro_batch: int, allocator: Allocator) -> MemoryCurve:
    """Return live memory over the events of the last step, in the steady state.

    The allocator is empty, without a limit. If it caches, its cached memory is a category of its own.
    """
    labels = labels_of(trace)
    made: Counter[str] = Counter()
    for block, size in trace.events:
        made[labels[block].part] += max(size, 0)
    shown = [part for part, _ in made.most_common(MOST_PARTS) if part][: MOST_PARTS - 1]
    # The last step follows the optimizer of the one before.
    follows = pairwise(trace.marks)
    first = max((at for (_, a), (at, b) in follows if (a, b) == ("optimizer", "forward")), default=0)
    live = dict.fromkeys((*KINDS, CACHED), 0)
    of_parts = dict.fromkeys([*(part for part in made if part in shown), OTHER_PARTS], 0)
    held: dict[int, tuple[object, int]] = {}
    streams = iter(trace.streams)
    rows: list[tuple[int, dict[str, int], dict[str, int]]] = []
    for at, (block, size) in enumerate(trace.events):
        if size == FREE:
            handle, taken = held.pop(block)
            allocator.free(handle)
        else:
            held[block] = allocator.malloc(size, next(streams, 0)), size
        change = -taken if size == FREE else size
        kind, part = labels[block]
        live[kind] += change
        if kind == ACTIVATIONS:
            of_parts[part if part in shown else OTHER_PARTS] += change
        if at >= first:
            tensors = sum(live[kind] for kind in KINDS)
            live[CACHED] = max(0, (allocator.reserved_bytes or 0) - tensors)
            rows.append((at - first, dict(live), dict(of_parts)))
    # The first, the last, every so many, and the one with most tensors.
    peak = max(rows, key=lambda row: sum(row[1][kind] for kind in KINDS), default=(0,))[0]
    stride = -(-len(rows) // (MOST_POSITIONS - 3))
    rows = [row for row in rows if row[0] % stride == 0 or row[0] in (peak, len(rows) - 1)]
    marks = [(at - first, phase) for at, phase in trace.marks if at >= first]
    names = [phase for _, phase in marks]
    phases = {}
    for number, (at, phase) in enumerate(marks):
        many = f" {names[: number + 1].count(phase)}" if names.count(phase) > 1 else ""
        phases[f"{phase}{many}"] = float(at)
    categories = {kind: [kinds[kind] for _, kinds, _ in rows] for kind in live}
    modules = {module_in_words(part): [parts[part] for _, _, parts in rows] for part in of_parts}
    return MemoryCurve(
        positions=[float(at) for at, _, _ in rows],
        categories={kind: sizes for kind, sizes in categories.items() if any(sizes)},
        phases=phases,
        modules={part: sizes for part, sizes in modules.items() if any(sizes)},
        micro_batch=micro_batch,
    )
