"""Scratch in traces: told from tensors, bounded, and replayed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.program import Program, Untraceable
from autobatch.footprint.scratch import Envelope, in_proportion, order_of_tensors, split

A, B, C, D = range(4)


def trace_of(*events: tuple[int, int]) -> Trace:
    return Trace(tuple(events))


def test_scratch_is_what_nothing_outlives() -> None:
    """A reduction takes a buffer and semaphores after its result; both go before anything else happens."""
    tensor, buffer, semaphores, last = A, B, C, D
    parts = split(
        trace_of(
            (tensor, 100), (buffer, 7), (semaphores, 5), (semaphores, FREE), (buffer, FREE),
            (last, 50), (tensor, FREE), (9, 1), (last, FREE), (8, 1),
        )
    )  # fmt: skip
    assert parts.scratch == {1: ((0, 7), (1, 5), (1, FREE), (0, FREE))}
    assert [size for _, size in parts.tensors.events] == [100, 50, FREE, 1, FREE, 1]


def test_a_block_that_another_outlives_is_a_tensor() -> None:
    """Keys of a sort live around the gradient, which stays: they are part of the step's own order."""
    parts = split(trace_of((A, 100), (B, 7), (A, FREE), (C, 1)))
    assert parts.scratch == {}
    assert len(parts.tensors.events) == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=40))
def test_a_split_loses_no_event(choices: list[tuple[int, int]]) -> None:
    """The oracle is a count: the parts have all blocks of the canonical trace, each exactly once."""
    events: list[tuple[int, int]] = []
    live: list[int] = []
    for number, (choice, size) in enumerate(choices):
        if choice < 3 and live:
            events.append((live.pop(-1 if choice else 0), FREE))
        else:
            live.append(number)
            events.append((number, size))
    trace = Trace(tuple(events)).canonical()
    parts = split(trace)
    sizes = [size for _, size in parts.tensors.events]
    for part in parts.scratch.values():
        sizes += [size for _, size in part]
        assert sum(size == FREE for _, size in part) * 2 == len(part)
    allocated = sorted(size for _, size in trace.events if size != FREE)
    assert sorted(size for size in sizes if size != FREE) == allocated
    assert set(parts.scratch) <= set(range(len(parts.tensors.events) + 1))


def step(m: int, scratch: int) -> Trace:
    """Return a step of two tensors, with scratch between them; none for 0 bytes."""
    between = [(B, scratch), (B, FREE)] if scratch else []
    return trace_of((A, 1000 * m + 64), *between, (C, 300 * m), (A, FREE), (D, 8))


def test_tensors_stay_lines_although_scratch_appears_past_a_size() -> None:
    bounds = Envelope.fit([(8, step(8, 0)), (37, step(37, 512)), (100, step(100, 2048))])
    assert (bounds.is_checked, bounds.largest) == (True, 100)
    for program, scratch in ((bounds.seen, 2048), (bounds.upper, 4096)):
        sizes = [size for _, size in program.at(200).events if size != FREE]
        assert sizes == [200_064, scratch, 60_000, 8]
    with pytest.raises(Untraceable, match="order of allocations"):
        Program.fit([(8, step(8, 0)), (37, step(37, 512))])


def test_the_bounds_hold_at_the_next_size_for_scratch_in_tiles() -> None:
    def tiles(m: int) -> int:
        return -(-m // 64) * 4096

    for m in (100, 128, 129, 191):
        bounds = Envelope.fit([(size, step(size, tiles(size))) for size in (8, 37, m)])
        low, high = (
            replay(program.at(m + 1), CachingAllocator()).peak_allocated_bytes
            for program in (bounds.seen, bounds.upper)
        )
        true = replay(step(m + 1, tiles(m + 1)), CachingAllocator()).peak_allocated_bytes
        assert low <= true
        # A tile that begins at the next size is the one jump that no run has shown.
        assert true <= high or tiles(m + 1) > tiles(m)


def test_small_sizes_that_take_other_steps_are_left_out() -> None:
    other = trace_of((A, 100), (B, 200), (C, 300), (B, FREE), (A, FREE), (D, 8))
    bounds = Envelope.fit([(2, other), (40, step(40, 0)), (80, step(80, 7))])
    assert not bounds.is_checked, "two runs are a line, and none has checked it"
    assert bounds.upper.at(80).events[0] == (A, 80_064)


def test_no_bounds_without_a_second_run_alike() -> None:
    other = trace_of((A, 100), (B, 200), (C, 300), (B, FREE), (A, FREE), (D, 8))
    with pytest.raises(Untraceable, match="no other run"):
        Envelope.fit([(2, other), (40, step(40, 0))])


def test_two_runs_of_a_parabola_are_no_line() -> None:
    def pairs(m: int) -> Trace:
        return trace_of((A, MiB), (B, 4 * m * m), (C, 5), (B, FREE), (D, 1))

    with pytest.raises(Untraceable, match="on no line"):
        Envelope.fit([(m, pairs(m)) for m in (8, 37)])
    bounds = Envelope.fit([(m, pairs(m)) for m in (8, 37, 60)])
    assert bounds.seen.at(100) == bounds.upper.at(100) == pairs(100)
    assert [
        Envelope.fit([(m, pairs(m)) for m in runs]).is_checked for runs in ((8, 37, 60), (8, 37, 60, 90))
    ] == [
        False,
        True,
    ]


def sorted_step(m: int) -> Trace:
    """Return a step whose gradient sorts many indices: keys live around the gradient, which stays."""
    keys = [(4, 8 * m)] if m > 50 else []
    return trace_of(
        (A, 1000 * m), *keys, (B, 4096), *[(block, FREE) for block, _ in keys], (C, 20 * m), (A, FREE), (D, 8)
    )


def test_scratch_around_a_result_is_told_by_the_tensors_of_smaller_runs() -> None:
    bounds = Envelope.fit([(m, sorted_step(m)) for m in (8, 37, 100)])
    assert bounds.is_checked
    assert [size for _, size in bounds.seen.at(200).events] == [200_000, 800, 4096, FREE, 4000, FREE, 8]
    assert bounds.upper.at(200) == sorted_step(200).canonical()


def test_another_order_of_tensors_at_the_largest_run_gives_no_bounds() -> None:
    other = trace_of((A, 100_001), (B, 4096), (A, FREE), (C, 2000), (D, 8))
    with pytest.raises(Untraceable, match="do not occur"):
        Envelope.fit([(8, sorted_step(8)), (37, sorted_step(37)), (100, other)])


def test_blocks_in_proportion_grow_unless_the_setup_has_their_size() -> None:
    trace = Trace(((0, 400), (1, 30), (2, 400), (1, FREE), (3, 90)), ((0, "setup"), (1, "forward")))
    program = in_proportion(3, trace)
    assert program.at(3).events == trace.canonical().events
    assert [size for _, size in program.at(5).events] == [400, 50, 400, FREE, 150]


def test_scratch_leaves_the_order_of_tensors_as_it_is() -> None:
    plain = Trace(((0, 8), (1, 16), (0, FREE), (2, 4)))
    scratch = Trace(((0, 8), (5, 99), (5, FREE), (1, 16), (0, FREE), (2, 4)))
    other = Trace(((0, 8), (1, 16), (1, FREE), (0, FREE), (2, 4)))
    assert order_of_tensors(plain) == order_of_tensors(scratch)
    assert order_of_tensors(plain) != order_of_tensors(other)
