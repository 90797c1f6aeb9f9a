"""Traces of recorded events, in their canonical form, and replayed."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import MiB
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import FREE, Trace, replay, trace_of


def a_trace(seed: int, length: int) -> Trace:
    """Return random allocations and frees."""
    draw = random.Random(seed)
    events, live, made = [], [], 0
    for _ in range(length):
        if live and draw.random() < 0.45:
            events.append((live.pop(draw.randrange(len(live))), FREE))
        else:
            live.append(made)
            events.append((made, draw.choice([700, MiB, 3 * MiB, 12 * MiB])))
            made += 1
    releases = draw.sample(range(length + 1), draw.choice([0, min(length, 3)]))
    return Trace(tuple(events), releases=tuple(sorted(releases)))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_the_canonical_form_replays_alike(seed, length):
    trace = a_trace(seed, length)
    plain = trace.canonical()
    for new_allocator in (Allocator, CachingAllocator):
        before, after = replay(trace, new_allocator()), replay(plain, new_allocator())
        assert before.peak_allocated_bytes == after.peak_allocated_bytes
        assert before.peak_reserved_bytes == after.peak_reserved_bytes
    assert plain.canonical() == plain


def test_a_replay_empties_the_cache_where_the_program_did():
    events = ((0, 30 * MiB), (0, FREE), (1, 12 * MiB), (2, 40 * MiB))
    kept, emptied = (replay(Trace(events, releases=at), CachingAllocator()) for at in ((), (2,)))
    assert (kept.peak_reserved_bytes, emptied.peak_reserved_bytes) == (70 * MiB, 52 * MiB)


def entry(action: str, address: int, size: int = 0, **more: object) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def test_allocations_and_completed_frees_become_events() -> None:
    """An address that is used again is another block. Failed allocations have none (cuda/Module.cpp)."""
    entries = [
        entry("free_completed", 7),  # taken before the recording
        entry("alloc", 1000, 3 * MiB),
        {"action": "oom", "device_free": 5 * MiB, "size": 64 * MiB, "stream": 0},
        entry("free_requested", 1000),
        entry("free_completed", 1000),
        entry("segment_free", 9000, 20 * MiB),  # the cache is emptied
        entry("segment_free", 8000, 20 * MiB),
        entry("alloc", 1000, 2 * MiB),
    ]
    # Phases begin after so many allocations and frees, the free of the older block included.
    marks = [(1, "setup"), (2, "forward"), (4, "end")]
    trace = trace_of(entries, marks)
    assert trace.events == ((0, 3 * MiB), (0, FREE), (1, 2 * MiB))
    assert trace.marks == ((0, "setup"), (1, "forward"), (3, "end"))
    assert trace.releases == (2,)
