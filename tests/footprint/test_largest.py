"""The search for the largest micro-batch, against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.largest import largest
from autobatch.footprint.program import Program
from tests.support.recipes import recipes, trace, trace_of


@settings(max_examples=50, deadline=None)
@given(recipes(), st.integers(1, 60 * MiB), st.integers(1, 90), st.booleans())
def test_the_largest_against_brute_force(recipe, limit, cap, caching):
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3))])

    def allocator():
        return CachingAllocator(limit) if caching else CountingAllocator(limit)

    truth = [replay(program.at(m), allocator()).fits for m in range(1, cap + 1)]
    answer = largest(program, allocator, cap)
    if answer is None:
        assert not any(truth[:16])
    else:
        assert truth[answer - 1]
        assert not any(truth[answer : answer + 16])
    if sorted(truth, reverse=True) == truth:
        assert (answer or 0) == sum(truth)


def test_the_largest_of_two_orders_fits_in_both():
    program = Program.fit([(1, trace(100)), (2, trace(200))])
    assert largest(program, lambda: CountingAllocator(1000), 50) == 10
    assert largest(program, lambda: CountingAllocator(1000), 7) == 7
    assert largest(program, lambda: CountingAllocator(99), 7) is None
    other = Program.fit([(1, trace(130)), (2, trace(250))])
    assert largest(program, lambda: CountingAllocator(1000), 50, other=other) == (1000 - 10) // 120
    assert largest(other, lambda: CountingAllocator(1000), 50, other=program) == (1000 - 10) // 120
