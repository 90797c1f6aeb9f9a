"""The search for the largest micro-batch, against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import BudgetExceeded, CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint import largest as largest_of_footprint
from autobatch.footprint.largest import Fitting
from autobatch.footprint.program import Program
from tests.support.recipes import recipes, trace, trace_of


@settings(max_examples=50, deadline=None)
@given(recipes(), st.integers(1, 60 * MiB), st.integers(1, 90), st.booleans())
def test_the_largest_against_brute_force(recipe, limit, cap, caching):
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3))])

    def allocator():
        return CachingAllocator(limit) if caching else CountingAllocator(limit)

    truth = [replay(program.at(m), allocator()).fits for m in range(1, cap + 1)]
    answer = Fitting([program], allocator).largest(cap)
    # No gap is too long for the sizes below the bound, which are all replayed here.
    assert answer == max((m for m, fits in enumerate(truth, 1) if fits), default=0)


def test_the_largest_above_a_gap_is_found():
    """As on torch's CUDA allocator, 700 fits, 769 to 778 do not, and 1280 is the largest that does."""

    class Gapped(CachingAllocator):
        def malloc(self, size):
            if size > 1280 * KiB or 768 * KiB < size <= 1000 * KiB:
                raise BudgetExceeded(requested=size, attempted=size, allocated=0, reserved=0, limit=20 * MiB)
            return super().malloc(size)

    program = Program.fit([(1, trace(KiB)), (2, trace(2 * KiB))])
    assert Fitting([program], lambda: Gapped(20 * MiB)).largest(50_000) == 1280


def test_the_rest_is_searched_if_no_size_near_the_bound_fits(monkeypatch):
    monkeypatch.setattr(largest_of_footprint, "SCANNED_EVENTS", 10)
    program = Program.fit([(1, trace(KiB)), (2, trace(2 * KiB))])
    wasteful = AllocatorConfig(expandable_segments=False)
    found = Fitting([program], lambda: CachingAllocator(3 * MiB, wasteful)).largest(5000)
    fits = [replay(program.at(m), CachingAllocator(3 * MiB, wasteful)).fits for m in (found, found + 1)]
    assert fits == [True, False]


def test_the_largest_of_two_orders_fits_in_both():
    def allocator(limit=1000):
        return CountingAllocator(limit)

    program = Program.fit([(1, trace(100)), (2, trace(200))])
    assert Fitting([program], allocator).largest(50) == 10
    assert Fitting([program], allocator).largest(7) == 7
    assert Fitting([program], lambda: allocator(99)).largest(7) == 0
    other = Program.fit([(1, trace(130)), (2, trace(250))])
    assert Fitting([program, other], allocator).largest(50) == (1000 - 10) // 120
    assert Fitting([other, program], allocator).largest(50) == (1000 - 10) // 120
