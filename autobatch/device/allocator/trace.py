"""What a session allocated, in order, and what becomes of it under an allocator.

A `Trace` is recorded by a meter or made by a `autobatch.footprint.program.Program`; `replay` runs it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded

FREE = -1
"""In place of a size: the block is freed."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations and frees of a session, in order."""

    events: tuple[tuple[int, int], ...]
    """``(block, bytes)`` for an allocation, ``(block, FREE)`` for a free; ids may be used again after."""
    marks: tuple[tuple[int, str], ...] = ()
    """``(number of events before, phase)``: the phase from there on."""

    def phase_at(self, index: int) -> str | None:
        """The phase that the event of that index belongs to; ``None`` before the first mark."""
        at = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[at - 1][1] if at else None

    def followed_by(self, again: Repetition) -> Trace:
        """The trace with a `repetition` behind it."""
        return Trace(self.events + again.events, self.marks + again.marks)

    def canonical(self) -> Trace:
        """The same trace with blocks numbered as they are allocated, and runs of frees in that order.

        Some frees come in the order of a hash table (autocast's cache). Frees in a row leave the same free
        blocks behind in any order, so sorting them changes no replay. Left out are
        frees of unknown blocks, and what is freed after the last allocation: no peak depends on it.
        """
        numbers: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        marks: list[tuple[int, str]] = []
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
        return Trace(tuple(events), tuple(marks))


class Repetition(NamedTuple):
    """What a part of a trace adds when it runs once more."""

    events: tuple[tuple[int, int], ...]
    marks: tuple[tuple[int, str], ...]
    blocks: int
    """How many blocks it takes."""


def repetition(trace: Trace, since: int, first_mark: int) -> Repetition | None:
    """What comes after a trace whose last part, from event ``since`` on, runs once more.

    A window in the steady state leaves behind what it found: the same state, and of what the window before
    it left (its batch, say) a new one of the same size in the same place. Then the next window is the same.

    Args:
        trace: with blocks numbered as they are taken.
        since: index of the first event of that part.
        first_mark: index of its first mark.

    Returns:
        ``None`` where the part leaves something else behind than it found.
    """
    sizes = {block: size for block, size in trace.events if size != FREE}
    found = _live(trace.events[:since])
    left = _live(trace.events)
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
    """What became of a trace; sizes in bytes, ``None`` where the allocator has no such figure."""

    fits: bool
    allocated_bytes: int
    """Held at the end."""
    reserved_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    retries: int | None
    peak_at: int
    """Index of the event after which most was allocated."""
    peak_phase: str | None
    failed_at: int | None = None
    """Index of the event that was refused."""
    failed_phase: str | None = None
    refusal: BudgetExceeded | None = None


def replay(trace: Trace, allocator: Allocator) -> Replay:
    """Run a trace through an allocator, as far as it goes."""
    handles: dict[int, Any] = {}
    malloc, free = allocator.malloc, allocator.free
    peak, peak_at, failed_at, refusal = -1, 0, None, None
    for index, (block, size) in enumerate(trace.events):
        if size == FREE:
            if block in handles:
                free(handles.pop(block))
            continue
        try:
            handles[block] = malloc(size)
        except BudgetExceeded as error:
            failed_at, refusal = index, error
            break
        if allocator.allocated_bytes > peak:
            peak, peak_at = allocator.allocated_bytes, index
    return Replay(
        fits=refusal is None,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries,
        peak_at=peak_at,
        peak_phase=trace.phase_at(peak_at),
        failed_at=failed_at,
        failed_phase=None if failed_at is None else trace.phase_at(failed_at),
        refusal=refusal,
    )
