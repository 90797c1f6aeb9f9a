"""The allocations of a session in order, and their replay in an allocator."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded

FREE = -1
"""The size of an event that frees its block."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations and frees of a session, in order, as a meter records or a program predicts them."""

    events: tuple[tuple[int, int], ...]
    """``(block, bytes)`` for an allocation, ``(block, FREE)`` for a free. A freed number may be reused."""
    marks: tuple[tuple[int, str], ...] = ()
    """``(number of events before, phase)``: the phase that begins there."""
    modules: tuple[tuple[int, str], ...] = ()
    """``(number of events before, dotted name)``: the module whose forward pass runs from there on, empty for
    none."""
    is_canonical: bool = field(default=False, compare=False)
    """True if `canonical` would change nothing."""

    def phase_at(self, index: int) -> str | None:
        """Return the phase of an event; None before the first mark."""
        at = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[at - 1][1] if at else None

    def followed_by(self, again: Repetition) -> Trace:
        """Return the trace followed by a `repetition`."""
        return Trace(self.events + again.events, self.marks + again.marks)

    def canonical(self) -> Trace:
        """Return the same trace with blocks numbered in the order of allocation, and with sorted frees.

        Some frees come in the order of a hash table (autocast's cache). Consecutive frees leave the same free
        blocks in any order, so sorting them changes no replay. Frees of unknown blocks, and frees after the
        last allocation, are left out: no peak depends on them.
        """
        if self.is_canonical:
            return self
        numbers: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        marks: list[tuple[int, str]] = []
        modules: list[tuple[int, str]] = []
        entered = iter(self.modules)
        entering = next(entered, None)
        coming = list(reversed(self.marks))
        freed: list[int] = []
        fresh = 0
        for index, (block, size) in enumerate(self.events):
            at_mark = bool(coming) and coming[-1][0] <= index
            if size != FREE or at_mark:
                events.extend((number, FREE) for number in sorted(freed))
                freed.clear()
            while coming and coming[-1][0] <= index:
                marks.append((len(events), coming.pop()[1]))
            while entering is not None and entering[0] <= index:
                place = len(events) + len(freed)
                modules[len(modules) - (bool(modules) and modules[-1][0] == place) :] = [(place, entering[1])]
                entering = next(entered, None)
            if size != FREE:
                numbers[block] = fresh
                events.append((fresh, size))
                fresh += 1
            elif block in numbers:
                freed.append(numbers.pop(block))
        while events and events[-1][1] == FREE:
            events.pop()
        marks = [(min(position, len(events)), phase) for position, phase in marks]
        marks.extend((len(events), phase) for _, phase in reversed(coming))
        return Trace(tuple(events), tuple(marks), tuple(modules), is_canonical=True)

    def without_empty(self) -> Trace:
        """Return the canonical trace without blocks of no bytes, which no allocator sees."""
        whole = self.canonical()  # no two of its blocks have the same number
        empty = {block for block, size in whole.events if size == 0}
        if not empty:
            return whole
        places = [0, *accumulate(block not in empty for block, _ in whole.events)]
        events = tuple(event for event in whole.events if event[0] not in empty)
        return Trace(events, tuple((places[at], phase) for at, phase in whole.marks)).canonical()


class Repetition(NamedTuple):
    """The events, marks and number of blocks that a part of a trace adds when it runs once more."""

    events: tuple[tuple[int, int], ...]
    marks: tuple[tuple[int, str], ...]
    blocks: int


def repetition(trace: Trace, since: int, first_mark: int) -> Repetition | None:
    """Return the events to add when the last part of a trace, from event ``since`` on, runs once more.

    A step in the steady state leaves what it found: the same state, and for each block left by the step
    before (its batch, for example) a new one of the same size in the same place. The next step is then the
    same.

    Args:
        trace: A trace whose blocks are numbered in the order of allocation.
        since: Index of the first event of that part.
        first_mark: Index of its first mark.

    Returns:
        None if the part does not leave what it found.
    """
    sizes = {block: size for block, size in trace.events if size != FREE}
    found, left = _live(trace.events[:since]), _live(trace.events)
    gone, come = sorted(found - left), sorted(left - found)
    if [sizes[block] for block in gone] != [sizes[block] for block in come]:
        return None
    first = 1 + max((block for block, size in trace.events[:since] if size != FREE), default=-1)
    count = 1 + max(sizes, default=-1) - first
    next_of = dict(zip(gone, come, strict=True))
    shift = len(trace.events) - since
    return Repetition(
        tuple(
            (block + count if block >= first else next_of[block], size)
            for block, size in trace.events[since:]
        ),
        tuple((position + shift, phase) for position, phase in trace.marks[first_mark:]),
        count,
    )


def _live(events: tuple[tuple[int, int], ...]) -> set[int]:
    live: set[int] = set()
    for block, size in events:
        (live.discard if size == FREE else live.add)(block)
    return live


class Replay(NamedTuple):
    """The outcome of a replay, up to the first refusal. Sizes are bytes; None if nothing is cached."""

    fits: bool
    allocated_bytes: int
    """Bytes held at the end."""
    reserved_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_at: int
    """Index of the event after which most bytes were allocated."""
    peak_phase: str | None


def replay(trace: Trace, allocator: Allocator) -> Replay:
    """Run a trace through an allocator, up to the first refusal."""
    handles: dict[int, Any] = {}
    malloc, free = allocator.malloc, allocator.free
    peak, peak_at, fits = -1, 0, True
    for index, (block, size) in enumerate(trace.events):
        if size == FREE:
            if block in handles:
                free(handles.pop(block))
            continue
        try:
            handles[block] = malloc(size)
        except BudgetExceeded:
            fits = False
            break
        if allocator.allocated_bytes > peak:
            peak, peak_at = allocator.allocated_bytes, index
    return Replay(
        fits=fits,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_at=peak_at,
        peak_phase=trace.phase_at(peak_at),
    )
