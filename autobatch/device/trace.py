"""The allocations of a session in order, and their replay in an allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autobatch.device.allocator import Allocator, BudgetExceeded

FREE = -1
"""The size of an event that frees its block."""
OLDER = -1
"""The number of a block that is older than a recording, which only frees it."""
COMMON_POOL = (0, 0)
"""Pool of all blocks that belong to no CUDA graph and no ``torch.cuda.MemPool``."""
RELEASES = ("segment_free", "segment_unmap")
"""Entries of a program that empties the cache, as a search of cuDNN for its fastest kernel does."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations and frees of a session, in order, as a meter records or a program predicts them."""

    events: tuple[tuple[int, int], ...]
    """``(block, bytes)`` for an allocation, ``(block, FREE)`` for a free. Blocks have numbers in the order of
    allocation."""
    marks: tuple[tuple[int, str], ...] = ()
    """``(number of events before, phase)``: the phase that begins there."""
    modules: tuple[tuple[int, str], ...] = ()
    """``(number of events before, dotted name)``: the module whose forward pass runs from there on, empty for
    none."""
    releases: tuple[int, ...] = ()
    """Numbers of events before each of which the program emptied the allocator's cache."""
    streams: tuple[int, ...] = ()
    """The number of the stream of each allocation, in order; empty if there is only one. A private pool is a
    stream of its own."""

    def phase_at(self, index: int) -> str | None:
        """Return the phase of an event; None before the first mark."""
        at = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[at - 1][1] if at else None

    def live_after(self, index: int) -> dict[int, int]:
        """Return the bytes of the blocks that are live after an event, by their numbers."""
        live: dict[int, int] = {}
        for block, size in self.events[: index + 1]:
            if size == FREE:
                del live[block]
            else:
                live[block] = size
        return live

    def canonical(self) -> Trace:
        """Return the trace of recorded events in the form that two runs of one program have in common.

        Some frees come in the order of a hash table (autocast's cache). Consecutive frees leave the same free
        blocks in any order, so sorting those between two notes changes no replay. Frees of older blocks and
        frees after the last allocation are left out: no peak depends on them.
        """
        noted = {*self.releases, *(position for position, _ in (*self.marks, *self.modules))}
        moved: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        freed: list[int] = []
        for index, (block, size) in enumerate(self.events):
            if size != FREE or index in noted:
                events.extend((number, FREE) for number in sorted(freed))
                freed.clear()
                moved[index] = len(events)
            if size != FREE:
                events.append((block, size))
            elif block != OLDER:
                freed.append(block)
        while events and events[-1][1] == FREE:
            events.pop()

        def placed(notes: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
            return ((min(moved.get(position, len(events)), len(events)), name) for position, name in notes)

        modules = dict(placed(self.modules))  # the last one of those at one place
        releases = tuple(position for position, _ in placed((position, "") for position in self.releases))
        marks = tuple(placed(self.marks))
        return Trace(tuple(events), marks, tuple(modules.items()), releases, self.streams)


def trace_of(
    entries: Iterable[Mapping[str, Any]],
    marks: Sequence[tuple[int, str]] = (),
    modules: Sequence[tuple[int, str]] = (),
) -> Trace:
    """Turn what the allocator recorded into a trace: a block per allocation, freed when its free completes.

    Allocations that failed are left out: their entries have no address (cuDNN catches the error and tries
    another plan, torch aten/src/ATen/native/cudnn/Conv_v8.cpp).

    Args:
        entries: Of the allocator of one GPU.
        marks: ``(allocations and frees before, phase)``.
        modules: The same for the modules that run.
    """
    numbers: dict[int, int] = {}
    """Of the live blocks, by address."""
    events: list[tuple[int, int]] = []
    releases: dict[int, None] = {}
    streams: list[int] = []
    stream_numbers: dict[object, int] = {}
    for entry in entries:
        action = entry["action"]
        if action == "alloc":
            numbers[entry["addr"]] = len(streams)
            events.append((len(streams), int(entry["size"])))
            streams.append(stream_numbers.setdefault(stream_of(entry), len(stream_numbers)))
        elif action == "free_completed":
            events.append((numbers.pop(entry["addr"], OLDER), FREE))
        elif action in RELEASES:
            releases[len(events)] = None
    recorded = Trace(tuple(events), tuple(marks), tuple(modules), tuple(releases), tuple(streams))
    return recorded.canonical()


def stream_of(entry: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Return the stream of an event of the allocator or of a segment, with its private pool."""
    pool = entry.get("pool_id") or entry.get("segment_pool_id") or COMMON_POOL
    return entry.get("stream", 0), tuple(pool)


class Replay(NamedTuple):
    """The outcome of a replay, up to the first refusal. Sizes are bytes; None if nothing is cached."""

    fits: bool
    allocated_bytes: int
    """Bytes held at the end."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_at: int
    """Index of the event after which most bytes were allocated."""


def replay(trace: Trace, allocator: Allocator) -> Replay:
    """Run a trace through an allocator, up to the first refusal."""
    handles: dict[int, Any] = {}
    malloc, free = allocator.malloc, allocator.free
    peak, peak_at, fits = -1, 0, True
    releases, streams = {*trace.releases}, iter(trace.streams)
    for index, (block, size) in enumerate(trace.events):
        if index in releases:
            allocator.release()
        if size == FREE:
            free(handles.pop(block))
            continue
        try:
            handles[block] = malloc(size, next(streams, 0))
        except BudgetExceeded:
            fits = False
            break
        if allocator.allocated_bytes > peak:
            peak, peak_at = allocator.allocated_bytes, index
    return Replay(
        fits=fits,
        allocated_bytes=allocator.allocated_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_at=peak_at,
    )
