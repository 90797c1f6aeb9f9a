"""Programs fitted to traces, against brute force."""

from __future__ import annotations

import msgspec
import pytest
from autobatch.device.allocator.onednn_workspace import whole_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.program import Derived, DerivedSize, Polynomial, Program, Untraceable
from tests.support.recipes import recipes, trace, trace_of


@settings(max_examples=50)
@given(recipes(), st.randoms(use_true_random=False))
def test_two_points_give_every_other_micro_batch(recipe, rng):
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3, shuffle=rng))])
    for m in (1, 2, 3, 8, 129, 10_007):
        assert program.at(m) == trace_of(recipe, m).canonical()
        assert program.agrees_with(m, trace_of(recipe, m, shuffle=rng))
    bigger = [(block, size + (size > 0)) for block, size in trace_of(recipe, 8).events]
    grows = any(size > 0 for _, size in bigger)
    assert program.agrees_with(8, Trace(tuple(bigger), ((0, "forward"),))) is not grows


@settings(max_examples=50)
@given(recipes(square=True))
def test_three_points_give_a_quadratic(recipe):
    program = Program.fit([(m, trace_of(recipe, m)) for m in (2, 3, 5)])
    for m in (1, 7, 64, 1001):
        assert program.at(m) == trace_of(recipe, m).canonical()


@settings(max_examples=50)
@given(recipes(), st.randoms(use_true_random=False))
def test_sorting_frees_changes_no_replay(recipe, rng):
    plain, other = trace_of(recipe, 9), trace_of(recipe, 9, shuffle=rng)
    outcomes = [replay(t, CachingAllocator(24 * MiB)) for t in (plain, other, plain.canonical())]
    unlike = {"peak_at": 0, "allocated_bytes": 0}
    assert len({outcome._replace(**unlike) for outcome in outcomes}) == 1


def test_a_beginning_is_compared_up_to_its_last_allocation():
    def trace(m, extra=()):
        return Trace(((0, 10 * m), (1, 7), (0, FREE), *extra))

    program = Program.fit([(m, trace(m, ((2, m), (1, FREE), (3, 5)))) for m in (2, 3)])
    assert program.begins_with(9, trace(9))
    assert program.begins_with(9, trace(9, ((2, 9),)))
    assert not program.begins_with(9, trace(8))
    assert not program.begins_with(9, trace(9, ((2, 8),)))
    assert not program.begins_with(9, trace(9, ((2, 9), (3, 5), (4, 5), (5, 5))))


def test_pairs_of_samples_have_a_half_in_their_rule():
    """m(m-1)/2 distances of 4 bytes are integers, but a coefficient is a fraction."""
    program = Program.fit([(m, trace(6 * m * (m - 1) // 2)) for m in (2, 3, 4)])
    assert program.at(101).events == ((0, 6 * 101 * 50),)


@pytest.mark.parametrize(
    "points",
    [
        [(2, trace(10)), (3, trace(10, 10))],
        [(2, Trace(((0, 8), (0, FREE), (1, 8)))), (3, Trace(((0, 8), (1, 8), (0, FREE))))],
        [(2, Trace(((0, 8),), ((0, "forward"),))), (3, Trace(((0, 8),), ((1, "forward"),)))],
        [(2, trace(10)), (4, trace(13))],  # 1.5 bytes a sample
        [(2, trace(10)), (3, trace(20)), (4, trace(30)), (5, trace(41))],  # the fourth checks
    ],
)
def test_traces_without_a_program_have_a_reason(points):
    with pytest.raises(Untraceable, match=r"bytes|events|differ"):
        Program.fit(points)


def test_no_size_is_ever_negative():
    program = Program.fit([(3, trace(10)), (4, trace(20))])
    with pytest.raises(Untraceable, match="-10 bytes at micro-batch 1"):
        program.at(1)
    assert not program.agrees_with(1, trace(0))


def test_parts_of_whole_pages_are_fitted_before_they_are_rounded():
    """Rounded sizes follow no polynomial; those of the parts do, and each is rounded on its own."""
    parts = {m: (1000 * m, 4096 * m, 10) for m in (2, 3, 7)}
    traces = [(m, Trace(((0, 8), (1, whole_pages(parts[m])), (0, FREE)))) for m in (2, 3)]
    program = Program.fit(traces, [{1: DerivedSize("pages", parts[m])} for m in (2, 3)])
    assert program.at(7).events[1] == (1, 2 * 4096 + 7 * 4096 + 4096)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(program), type=Program) == program
    with pytest.raises(Untraceable, match="grows by another part"):
        Derived("pages", (Polynomial(1),)).plus(1)
