"""Traces in their canonical form, and replayed."""

from __future__ import annotations

import random
from bisect import bisect_left

from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import MiB
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import FREE, OLDER, Trace, replay


def a_trace(seed: int, length: int) -> Trace:
    """Return random allocations and frees, also of older blocks."""
    draw = random.Random(seed)
    events, live, made = [], [OLDER], 0
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
    known = [place for place, event in enumerate(trace.events) if event != (OLDER, FREE)]
    moved = tuple(bisect_left(known, place) for place in trace.releases)
    trace = Trace(tuple(trace.events[place] for place in known), releases=moved)
    for new_allocator in (Allocator, CachingAllocator):
        before, after = replay(trace, new_allocator()), replay(plain, new_allocator())
        assert before.peak_allocated_bytes == after.peak_allocated_bytes
        assert before.peak_reserved_bytes == after.peak_reserved_bytes
    assert plain.canonical() == plain


def test_a_replay_empties_the_cache_where_the_program_did():
    events = ((0, 30 * MiB), (0, FREE), (1, 12 * MiB), (2, 40 * MiB))
    kept, emptied = (replay(Trace(events, releases=at), CachingAllocator()) for at in ((), (2,)))
    assert (kept.peak_reserved_bytes, emptied.peak_reserved_bytes) == (70 * MiB, 52 * MiB)
