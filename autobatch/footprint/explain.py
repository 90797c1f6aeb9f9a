"""Explanations of a footprint: its peak by purpose and module, its course over a step, and its growth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from autobatch.core.records import MemoryCurve, PredictedPoint
from autobatch.core.text import module_in_words
from autobatch.core.units import format_bytes
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import FREE, replay
from autobatch.footprint.fit import Footprint
from autobatch.footprint.program import Untraceable

MODULES = 3
"""Modules that an explanation names."""
POINTS = 24
"""Micro-batches whose peaks are predicted for a chart."""
MOST_POSITIONS = 500
"""Events of a step that a chart keeps."""
KINDS = (
    "parameters",
    "averaged weights",
    "optimizer state",
    "gradients",
    "gathered layers",
    "batch",
    "activations",
    "temporaries",
)
"""Kinds of memory from the bottom of a chart upwards, in the order of how long they stay."""
DEPTH = 2
"""Parts of a module's name that an explanation keeps."""
CACHED = "cached"
"""Memory that the allocator holds without any tensor in it."""


class Explanation(NamedTuple):
    """Live bytes at the peak of a step."""

    micro_batch: int
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
        return f"{format_bytes(self.peak_bytes)} at the peak in the {self.phase}: {parts}{modules}"


def explain(step: Footprint, micro_batch: int) -> Explanation:
    """Explain the peak of a step.

    Args:
        step: the footprint.
        micro_batch: the size to explain.

    Raises:
        Untraceable: the footprint is invalid at that size.
    """
    trace = step.program.at(micro_batch)
    outcome = replay(trace, CountingAllocator())
    live: dict[int, int] = {}
    for block, size in trace.events[: outcome.peak_at + 1]:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = size
    by_kind: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for block, size in live.items():
        kind, module = step.labels[block]
        by_kind[kind] += size
        if kind == "activations":
            by_module[".".join(module.split(".")[:DEPTH]) or "(the model itself)"] += size
    return Explanation(
        micro_batch=micro_batch,
        peak_bytes=outcome.peak_allocated_bytes,
        phase=outcome.peak_phase or "setup",
        by_kind=dict(by_kind.most_common()),
        by_module=dict(by_module.most_common()),
    )


def memory_curve(step: Footprint, micro_batch: int, allocator: Allocator) -> MemoryCurve:
    """Return live memory over the events of the last step, in the steady state.

    Args:
        step: the footprint.
        micro_batch: the size to show.
        allocator: empty, without a limit. If it caches, its cached memory is a category of its own.

    Raises:
        Untraceable: the footprint is invalid at that size.
    """
    trace = step.program.at(micro_batch)
    # The last step follows the optimizer of the one before.
    steps = [
        position
        for (_, before), (position, phase) in pairwise(trace.marks)
        if (before, phase) == ("optimizer", "forward")
    ]
    first = steps[-1] if steps else 0
    live = dict.fromkeys(KINDS, 0)
    blocks: dict[int, tuple[object, int]] = {}
    rows: list[tuple[int, dict[str, int]]] = []
    for index, (block, size) in enumerate(trace.events):
        kind = step.labels[block].kind
        if size == FREE:
            handle, held = blocks.pop(block)
            allocator.free(handle)
            live[kind] -= held
        else:
            blocks[block] = allocator.malloc(size), size
            live[kind] += size
        if index >= first:
            cached = max(0, (allocator.reserved_bytes or 0) - sum(live.values()))
            rows.append((index - first, {**live, CACHED: cached}))
    rows = _downsample(rows)
    marks = [(position - first, phase) for position, phase in trace.marks if position >= first]
    return MemoryCurve(
        positions=[float(position) for position, _ in rows],
        categories={
            name: [row[name] for _, row in rows]
            for name in (*KINDS, CACHED)
            if any(row[name] for _, row in rows)
        },
        phases=_numbered(marks),
    )


def predicted_points(
    step: Footprint, micro_batch: int, new_allocator: Callable[[], Allocator], cap: int
) -> list[PredictedPoint]:
    """Return predicted peaks at micro-batches around an answer, which is among them with its successor.

    Args:
        step: the footprint.
        micro_batch: the answer.
        new_allocator: returns an empty allocator without a limit.
        cap: the largest micro-batch to predict.
    """
    last = min(cap, max(micro_batch + 1, micro_batch * 5 // 4))
    spread = {1 + (last - 1) * number // (POINTS - 1) for number in range(POINTS)}
    points = []
    for size in sorted(spread | {micro_batch, min(micro_batch + 1, last)}):
        try:
            outcome = replay(step.program.at(size), new_allocator())
        except Untraceable:
            continue
        peak = outcome.peak_reserved_bytes
        held = outcome.peak_allocated_bytes if peak is None else peak
        points.append(PredictedPoint(micro_batch=size, peak_reserved_bytes=held))
    return points


def _numbered(marks: Sequence[tuple[int, str]]) -> dict[str, float]:
    """Return the positions where phases begin, numbered if a phase repeats."""
    names = [phase for _, phase in marks]
    found: dict[str, float] = {}
    for number, (position, phase) in enumerate(marks):
        count = names[: number + 1].count(phase)
        found[f"{phase} {count}" if names.count(phase) > 1 else phase] = float(position)
    return found


def _downsample(rows: list[tuple[int, dict[str, int]]]) -> list[tuple[int, dict[str, int]]]:
    """Keep the first row, the last one, and the row with the most live memory of each stretch between."""
    if len(rows) <= MOST_POSITIONS:
        return rows
    inner = rows[1:-1]
    count = MOST_POSITIONS - 2
    edges = [len(inner) * number // count for number in range(count + 1)]
    tops = [
        max(inner[start:end], key=lambda row: sum(row[1].values()) - row[1][CACHED])
        for start, end in pairwise(edges)
    ]
    return [rows[0], *tops, rows[-1]]
