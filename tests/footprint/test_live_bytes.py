"""Live bytes without a replay, against replays of random programs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.largest import LiveBytes
from autobatch.footprint.program import Polynomial, Program, Untraceable

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.none() | st.tuples(st.integers(0, 90), st.integers(0, 9)).map(lambda rule: Polynomial(*rule)),
    ),
    max_size=40,
)


def without_doubles(events):
    """Leave out allocations of a number that is taken."""
    live: set[int] = set()
    for block, rule in events:
        if rule is None or block not in live:
            (live.discard if rule is None else live.add)(block)
            yield block, rule


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.integers(0, 10**6))
def test_the_peak_is_that_of_a_replay(events, m):
    program = Program(tuple(without_doubles(events)), ())
    expected = replay(program.at(m), CountingAllocator()).peak_allocated_bytes
    assert LiveBytes(program.events).peak_at(m) == expected


def test_a_size_below_zero_is_refused():
    with pytest.raises(Untraceable, match="bytes at micro-batch 2"):
        LiveBytes([(0, Polynomial(5, -3))]).peak_at(2)
