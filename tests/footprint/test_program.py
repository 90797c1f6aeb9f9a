"""Programs fitted to traces, against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import FREE, Trace, replay
from autobatch.footprint import program as fittings
from autobatch.footprint.program import Fitting, Program, Untraceable, rule_through


@st.composite
def recipes(draw):
    """Steps of a random program: ``(slope, constant)`` allocates, an int frees a live block."""
    sizes = st.tuples(st.integers(0, 300 * KiB), st.integers(0, 3 * MiB))
    return draw(st.lists(st.one_of(sizes, sizes, st.integers(0, 30)), min_size=1, max_size=30))


def trace_of(recipe, m: int, *, shuffle: random.Random | None = None) -> Trace:
    """Execute a recipe. With ``shuffle``, runs of frees are shuffled."""
    events: list[tuple[int, int]] = []
    live: list[int] = []
    ids = itertools.count()
    frees: list[tuple[int, int]] = []

    def flush():
        if shuffle is not None:
            shuffle.shuffle(frees)
        events.extend(frees)
        frees.clear()

    for step in recipe:
        if isinstance(step, int):
            if live:
                frees.append((live.pop(step % len(live)), FREE))
            continue
        flush()
        live.append(next(ids))
        events.append((live[-1], step[0] * m + step[1]))
    flush()
    return Trace(tuple(events), ((0, "forward"),)).canonical()


def trace(*sizes: int) -> Trace:
    """Return a trace that takes a block of each size."""
    return Trace(tuple(enumerate(sizes)))


@settings(max_examples=50)
@given(recipes(), st.randoms(use_true_random=False))
def test_two_points_give_every_other_micro_batch(recipe, rng) -> None:
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3, shuffle=rng))])
    for m in (1, 2, 3, 8, 129, 10_007):
        assert program.at(m) == trace_of(recipe, m)
        assert program.at(m) == trace_of(recipe, m, shuffle=rng)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(program), type=Program) == program


def test_the_cache_is_emptied_at_all_sizes_where_it_was_at_one() -> None:
    """A cache that holds nothing is emptied without an event."""
    small, large = (replace(trace(m, 2 * m), releases=at) for m, at in ((2, ()), (3, (1,))))
    assert Program.fit([(2, small), (3, large)]).at(4).releases == (1,)


@pytest.mark.parametrize(
    ("size_of", "points"),
    [
        (lambda m: 5 * m * (m - 1) // 2, (2, 3, 4)),  # distances of pairs: a coefficient is a fraction
        (lambda m: MiB * -(-m // 64), (1158, 1336)),  # scratch of the sum of a bias gradient
        (lambda m: 100 + 7 * m, (4, 12)),
    ],
)
def test_every_other_size_follows_from_few(size_of, points) -> None:
    rule = rule_through(points, [size_of(m) for m in points])
    assert rule.is_exact
    assert [rule.at(m) for m in range(points[0], 3000)] == [size_of(m) for m in range(points[0], 3000)]


def test_two_sizes_without_a_rule_are_joined_and_are_least_if_they_do_not_grow() -> None:
    """Scratch of which nothing is known: a guess lets it grow, and a proof does not."""
    program = Program.fit([(40, trace(1000, 80)), (43, trace(1010, 50))])
    assert program.at(46).events == ((0, 1020), (1, 80))
    assert program.at(46, since=43).events == ((0, 1010), (1, 80))
    assert program.at(1).events == ((0, 870), (1, 80))


@pytest.mark.parametrize(
    "points",
    [
        [(2, trace(10)), (3, trace(10, 10))],
        [(2, Trace(((0, 8), (0, FREE), (1, 8)))), (3, Trace(((0, 8), (1, 8), (0, FREE))))],
        [(2, Trace(((0, 8),), ((0, "forward"),))), (3, Trace(((0, 8),), ((1, "forward"),)))],
        [(2, trace(10)), (3, trace(20)), (4, trace(30)), (5, trace(41))],  # the fourth checks
    ],
)
def test_traces_without_a_program_have_a_reason(points) -> None:
    with pytest.raises(Untraceable, match=r"bytes|events|differ"):
        Program.fit(points)


@settings(max_examples=60)
@given(recipes(), st.integers(1, 400), st.integers(10, 60), st.booleans())
def test_the_largest_size_is_the_largest_of_all_that_fit_in_a_replay(recipe, cap, budget, caches) -> None:
    program = Program.fit([(m, trace_of(recipe, m)) for m in (2, 3)])

    def new_allocator():
        return CachingAllocator(budget * MiB) if caches else Allocator(budget * MiB)

    fits = [m for m in range(1, cap + 1) if replay(program.at(m), new_allocator()).fits]
    assert Fitting([program], new_allocator).largest(cap) == max(fits, default=0)


def test_a_size_that_alone_fits_above_others_is_found() -> None:
    class Picky(CachingAllocator):
        def malloc(self, size: int, stream: int = 0) -> object:
            return super().malloc(size if size <= 100 * MiB or size == 900 * MiB else 1 << 50, stream)

    program = Program.fit([(m, trace(MiB * m)) for m in (2, 3)])
    assert Fitting([program], lambda: Picky(1000 * MiB)).largest(5000) == 900


def test_the_rest_is_searched_in_steps_if_no_size_near_the_bound_fits(monkeypatch) -> None:
    monkeypatch.setattr(fittings, "SCANNED_EVENTS", 10)

    class Wasteful(CachingAllocator):
        def malloc(self, size: int, stream: int = 0) -> object:
            return super().malloc(2 * size, stream)

    program = Program.fit([(m, trace(MiB * m)) for m in (2, 3)])
    found = Fitting([program], lambda: Wasteful(1000 * MiB)).largest(5000)
    assert found == 500
