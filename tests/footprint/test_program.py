"""Programs fitted to traces, and the search for the largest micro-batch, against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.program import Program, Untraceable, largest


@st.composite
def recipes(draw, *, square: bool = False):
    """Steps of a random program: ``(slope, constant, square)`` allocates, an int frees a live block."""
    sizes = st.tuples(
        st.integers(0, 300 * KiB), st.integers(0, 3 * MiB), st.integers(0, 500 if square else 0)
    )
    return draw(st.lists(st.one_of(sizes, sizes, st.integers(0, 30)), min_size=1, max_size=30))


def trace_of(recipe, m: int, *, shuffle: random.Random | None = None) -> Trace:
    """Execute a recipe. With ``shuffle``, runs of frees are shuffled and ids are reused."""
    events: list[tuple[int, int]] = []
    live: list[int] = []
    ids = iter(range(1000, 10**6))
    frees: list[tuple[int, int]] = []
    free_ids: list[int] = []

    def flush():
        if shuffle is not None:
            shuffle.shuffle(frees)
        events.extend(frees)
        free_ids.extend(block for block, _ in frees)
        frees.clear()

    for step in recipe:
        if isinstance(step, int):
            if live:
                frees.append((live.pop(step % len(live)), FREE))
            continue
        flush()
        reuse = shuffle is not None and free_ids and shuffle.random() < 0.5
        block = free_ids.pop() if reuse else next(ids)
        live.append(block)
        events.append((block, step[0] * m + step[1] + step[2] * m * m))
    flush()
    return Trace(tuple(events), ((0, "forward"),))


@settings(max_examples=50, deadline=None)
@given(recipes(), st.randoms(use_true_random=False))
def test_two_points_give_every_other_micro_batch(recipe, rng):
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3, shuffle=rng))])
    for m in (1, 2, 3, 8, 129, 10_007):
        assert program.at(m) == trace_of(recipe, m).canonical()
        assert program.agrees_with(m, trace_of(recipe, m, shuffle=rng))
    bigger = [(block, size + (size > 0)) for block, size in trace_of(recipe, 8).events]
    grows = any(size > 0 for _, size in bigger)
    assert program.agrees_with(8, Trace(tuple(bigger), ((0, "forward"),))) is not grows


@settings(max_examples=50, deadline=None)
@given(recipes(square=True))
def test_three_points_give_a_quadratic(recipe):
    program = Program.fit([(m, trace_of(recipe, m)) for m in (2, 3, 5)])
    for m in (1, 7, 64, 1001):
        assert program.at(m) == trace_of(recipe, m).canonical()


@settings(max_examples=50, deadline=None)
@given(recipes(), st.randoms(use_true_random=False))
def test_sorting_frees_changes_no_replay(recipe, rng):
    plain, other = trace_of(recipe, 9), trace_of(recipe, 9, shuffle=rng)
    outcomes = [replay(t, CachingAllocator(24 * MiB)) for t in (plain, other, plain.canonical())]
    unlike = {"refusal": None, "failed_at": None, "peak_at": 0, "allocated_bytes": 0}
    assert len({outcome._replace(**unlike) for outcome in outcomes}) == 1


def trace(*sizes: int) -> Trace:
    return Trace(tuple(enumerate(sizes)))


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


def test_a_fit_needs_two_different_sizes():
    with pytest.raises(ValueError, match="two or more"):
        Program.fit([(2, trace(1)), (2, trace(1))])


def test_no_size_is_ever_negative():
    program = Program.fit([(3, trace(10)), (4, trace(20))])
    with pytest.raises(Untraceable, match="-10 bytes at micro-batch 1"):
        program.at(1)
    assert not program.agrees_with(1, trace(0))


def test_blocks_that_stay_are_inserted_at_their_events():
    marks = ((0, "forward"), (1, "backward"))
    program = Program.fit([(m, Trace(((0, 5 * m), (1, 6)), marks)) for m in (1, 2)])
    more = program.with_blocks([(1, 100), (0, 40)])
    assert [size for _, size in more.at(3).events] == [40, 15, 100, 6]
    assert len({block for block, _ in more.events}) == 4
    assert more.marks == ((0, "forward"), (2, "backward"))
    assert replay(more.at(3), CountingAllocator()).peak_allocated_bytes == 161


@settings(max_examples=50, deadline=None)
@given(recipes(), st.integers(1, 60 * MiB), st.integers(1, 90), st.booleans(), st.booleans())
def test_the_largest_against_brute_force(recipe, limit, cap, caching, near_cap):
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3))])

    def allocator():
        return CachingAllocator(limit) if caching else CountingAllocator(limit)

    truth = [replay(program.at(m), allocator()).fits for m in range(1, cap + 1)]
    answer = largest(program, allocator, cap, near_cap=near_cap)
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
