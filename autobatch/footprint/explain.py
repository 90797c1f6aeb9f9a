"""Explanations of a footprint: its peak by purpose and module, its course over a step, and its growth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from autobatch.core.records import MemoryCurve, PredictedPoint
from autobatch.core.units import format_bytes
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
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
            f"`{name}` {format_bytes(size)}" for name, size in list(self.by_module.items())[:MODULES] if size
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
    activations = [block for block in live if step.labels[block].kind == "activations"]

    def group(blocks: list[int], name: Callable[[int], str]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for block in blocks:
            key = name(block)
            totals[key] = totals.get(key, 0) + live[block]
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    return Explanation(
        micro_batch=micro_batch,
        peak_bytes=outcome.peak_allocated_bytes,
        phase=outcome.peak_phase or "setup",
        by_kind=group(list(live), lambda block: step.labels[block].kind),
        by_module=group(activations, lambda block: _shorten(step.labels[block].module)),
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
    first = _last_step(trace)
    live = dict.fromkeys(KINDS, 0)
    handles: dict[int, tuple[object, int]] = {}
    rows: list[tuple[int, dict[str, int]]] = []
    for index, (block, size) in enumerate(trace.events):
        kind = step.labels[block].kind
        if size == FREE:
            handle, held = handles.pop(block)
            allocator.free(handle)
            live[kind] -= held
        else:
            handles[block] = allocator.malloc(size), size
            live[kind] += size
        if index >= first:
            rows.append((index - first, live | _cached(allocator, sum(live.values()))))
    rows = _downsample(rows)
    names = [name for name in rows[-1][1] if any(row[name] for _, row in rows)] if rows else []
    return MemoryCurve(
        positions=[float(position) for position, _ in rows],
        categories={name: [row[name] for _, row in rows] for name in names},
        phases=_phases(trace, first),
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


def _shorten(module: str) -> str:
    return ".".join(module.split(".")[:DEPTH]) or "(the model itself)"


def _last_step(trace: Trace) -> int:
    """Return the index of the first event of the last step, which follows the optimizer of the one before."""
    starts = [
        position
        for (_, before), (position, phase) in pairwise(trace.marks)
        if phase == "forward" and before == "optimizer"
    ]
    return starts[-1] if starts else 0


def _phases(trace: Trace, first: int) -> dict[str, float]:
    """Return the positions where the phases of the last step begin, numbered if a phase repeats."""
    marks = [(position - first, phase) for position, phase in trace.marks if position >= first]
    names = [phase for _, phase in marks]
    found: dict[str, float] = {}
    for number, (position, phase) in enumerate(marks):
        count = names[: number + 1].count(phase)
        found[f"{phase} {count}" if names.count(phase) > 1 else phase] = float(position)
    return found


def _cached(allocator: Allocator, live: int) -> dict[str, int]:
    reserved = allocator.reserved_bytes
    return {} if reserved is None else {CACHED: max(0, reserved - live)}


def _downsample(rows: list[tuple[int, dict[str, int]]]) -> list[tuple[int, dict[str, int]]]:
    """Keep the first row, the last one, and the row with the most live memory of each stretch between."""
    if len(rows) <= MOST_POSITIONS:
        return rows
    inner = rows[1:-1]
    count = MOST_POSITIONS - 2
    edges = [len(inner) * number // count for number in range(count + 1)]
    tops = [
        max(inner[start:end], key=lambda row: sum(row[1].values()) - row[1].get(CACHED, 0))
        for start, end in pairwise(edges)
    ]
    return [rows[0], *tops, rows[-1]]
