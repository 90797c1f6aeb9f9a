"""The search against brute force, over thousands of memory functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autobatch.cli.output import Terminated
from autobatch.core.units import MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.program import Program
from autobatch.rehearsal.attempt import Outcome
from autobatch.search.replay import Replay
from autobatch.search.search import search
from tests.support.sizes import BUDGET, Machine, machine_of, outcome_of, program_of, replay_of, trace_of

LINES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2000)), min_size=1, max_size=12)


def lines(pairs) -> list:
    return [lambda m, a=slope, b=constant: a * m + b for slope, constant in pairs]


class Wrong(Replay):
    """Predictions that are any number at all, and never change."""

    def __init__(self, likely: int, seed: int) -> None:
        super().__init__(replay_of()._new_allocator)
        self.likely, self.seed = likely, seed

    def largest(self, cap: int) -> int:
        return min(self.likely, cap)

    def guess(self, low: int, high: int) -> int:
        return hash((self.seed, low, high)) % (2 * high)


def find(machine: Machine, cap: int) -> Any:
    return search(machine.run, cap=cap, replay=replay_of())


def assert_proven(machine: Machine, found: Any, cap: int) -> None:
    """Assert that the answer ran and fits, and that the next size does not fit or is above the cap."""
    assert all(1 <= size <= cap for size in machine.asked)
    assert len(machine.asked) == len(set(machine.asked)), "no size is tried twice"
    if found.micro_batch == 0:
        assert not machine.fits(1)
        return
    assert found.micro_batch in machine.asked
    assert machine.fits(found.micro_batch)
    if found.upper_bound_by == "cap":
        assert found.micro_batch == cap
    else:
        assert found.upper_bound_by == "run"
        assert found.micro_batch + 1 in machine.asked
        assert not machine.fits(found.micro_batch + 1)


@given(
    values=st.lists(st.integers(0, 2 * BUDGET), min_size=1, max_size=60),
    cap=st.integers(1, 60),
)
@settings(max_examples=200)
def test_any_memory_function_gives_a_size_that_ran_below_one_that_does_not_fit(values, cap) -> None:
    """Noise, plateaus, cliffs and holes: the runs prove the answer for any function."""
    machine = Machine(lambda size: values[min(size, len(values)) - 1])
    assert_proven(machine, find(machine, cap), cap)


@given(
    share=st.integers(0, 1000),
    cap=st.integers(1, 5000),
    likely=st.integers(0, 5000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300)
def test_any_workload_and_any_prediction_stay_within_the_bound(share, cap, likely, seed) -> None:
    """What fits is drawn at random, and so are the guesses. Twice a prediction is in question at most."""
    machine = Machine(lambda size: 2 * BUDGET * (hash((seed, size)) % 1000 >= share))
    found = search(machine.run, cap=cap, replay=Wrong(likely, seed))
    assert_proven(machine, found, cap)
    reach = min(cap, 2 * max(likely, 2))
    if found.micro_batch < reach:
        assert len(machine.asked) <= math.log2(reach + 1) + 3
        assert machine.ooms <= math.log2(reach + 1) / 2 + 2


SHAPES: dict[str, Callable[[float, float], float]] = {
    "line": lambda m, _: m,
    "bend": lambda m, bend: m**bend,
    "saturation": lambda m, bend: 1 - (m + 1) ** -bend,
    "plateaus": lambda m, bend: math.ceil(m / (1 + 40 * bend)),
    "cliff": lambda m, bend: m > 1000 * bend,
    "holes": lambda m, bend: m * (1 + (m % 7 == 3)),
    "flaky": lambda m, bend: m * (0.95 + hash((bend, m)) % 1000 / 10_000),
}
"""Memory above its fixed part, up to a factor, by the micro-batch and a number between 0 and 3."""


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    bend=st.floats(0.02, 3),
    edge=st.integers(1, 5000),
    fixed=st.integers(0, BUDGET + 10),
    cap=st.integers(1, 5000),
    is_recorded=st.booleans(),
)
@example("saturation", 0.2, 4800, 0, 4700, False)
@example("bend", 0.15625, 976, 4157, 978, True)
@settings(max_examples=200)
def test_memory_of_any_shape_gives_a_proven_limit_in_few_runs(
    shape: str, bend: float, edge: int, fixed: int, cap: int, is_recorded: bool
) -> None:
    """No trace predicts. Guesses that creep up on memory that hardly grows take no run for each step."""
    part = (BUDGET - fixed) / max(SHAPES[shape](edge, bend), 1e-9)

    def memory(size: int) -> int:
        return max(fixed + int(part * SHAPES[shape](size, bend)), fixed)

    machine = Machine(memory, (lambda m: trace_of(lambda _: memory(m))(m)) if is_recorded else None)
    found = find(machine, cap)
    assert not found.micro_batch or machine.fits(found.micro_batch)
    # A replay is confirmed by runs, which may lie on a line by chance where memory is rounded.
    if found.upper_bound_by != "replay":
        assert_proven(machine, found, cap)
        assert shape in ("holes", "flaky") or found.micro_batch == machine.limit(cap)
    assert len(machine.asked) <= 3 * math.log2(cap + 1) + 8


@given(sizes=LINES, cap=st.integers(1, 4000))
@settings(max_examples=100)
def test_a_right_trace_takes_one_run(sizes, cap) -> None:
    machine = machine_of(*lines(sizes))
    found = search(machine.run, cap=cap, replay=replay_of(program_of(*lines(sizes))))
    assert found.micro_batch == machine.limit(cap)
    if found.micro_batch >= 2:
        assert (machine.asked, found.attempts[0].fits) == ([found.micro_batch], True)


@given(sizes=LINES, more=LINES, cap=st.integers(1, 4000))
@settings(max_examples=100)
def test_the_events_of_a_run_correct_a_trace_that_misses_some(sizes, more, cap) -> None:
    """The trace lacks scratch that the step takes; known blocks keep their rules."""
    machine = machine_of(*lines(sizes + more))
    found = search(machine.run, cap=cap, replay=replay_of(program_of(*lines(sizes))))
    assert found.micro_batch == machine.limit(cap)
    assert len(machine.asked) <= math.log2(2 * cap + 1) + 3
    assert machine.ooms <= math.log2(2 * cap + 1) / 2 + 2


def test_a_run_that_ends_over_the_budget_corrects_the_trace() -> None:
    """The trace lacks a workspace, and the allocator empties its cache where it finds no memory."""
    known, workspace = (lambda m: 20 * m + 300, lambda m: 7 * m), lambda m: 4000
    machine = machine_of(workspace, *known)

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        over = msgspec.structs.replace(outcome.attempt, phase=None)
        return outcome._replace(attempt=over, trace=trace_of(workspace, *known)(size))

    found = search(run, cap=10_000, replay=replay_of(program_of(*known)))
    assert found.micro_batch == machine.limit(10_000)
    assert (len(machine.asked), machine.ooms) == (2, 1)


def test_the_largest_size_above_a_gap_is_taken() -> None:
    """As on torch's CUDA allocator, a smaller size does not fit although a larger one does."""

    def fits(size: int) -> bool:
        return size <= 768 or 778 < size <= 1280

    class Gapped(CachingAllocator):
        def malloc(self, size: int) -> object:
            return super().malloc(size if fits(size // 1000) else 10**9)

    machine = Machine(lambda size: 0 if fits(size) else 2 * BUDGET, trace_of(lambda size: 1000 * size))
    replay = Replay(lambda: Gapped(10**8), program_of(lambda size: 1000 * size))
    found = search(machine.run, cap=5000, replay=replay)
    assert (found.micro_batch, found.upper_bound_by, machine.asked) == (1280, "replay", [1280])


def test_a_size_that_fails_in_the_other_order_only_brings_that_order_into_the_replay() -> None:
    rules, more = lines([(90, 100), (5, 5)]), lines([(100, 100), (5, 5)])
    machine = machine_of(*rules)
    other = machine_of(*more)

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if other.fits(size):
            return outcome
        failed = msgspec.structs.replace(outcome.attempt, fits=False, phase="backward")
        return Outcome(failed, outcome.trace, other.trace(1))

    new_allocator = replay_of()._new_allocator
    replay = Replay(new_allocator, program_of(*rules), lambda: program_of(*more))
    found = search(run, cap=10_000, replay=replay)
    assert (found.micro_batch, found.upper_bound_by) == (other.limit(10_000), "replay")
    assert machine.asked[0] == machine.limit(10_000)
    assert len(machine.asked) <= 3


@pytest.mark.parametrize("falls", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_the_order_of_segments_is_found_by_runs(is_first: bool, falls: bool) -> None:
    """The driver decides which of two free blocks of 20 MiB is lower: a lone one, or half of a segment.

    Whatever is taken from the half is missing when the whole segment is needed.
    """

    def trace(size: int) -> Trace:
        whole, halves, alone = [(0, 40), (0, FREE)], [(1, 20), (2, 20)], [(3, 20)]
        before = [*whole, *halves, *alone] if is_first else [*alone, *whole, *halves]
        events = [*before, (1, FREE), (3, FREE), (4, size), (2, FREE), (5, 28)]
        return Trace(tuple((block, one if one == FREE else one * MiB) for block, one in events))

    def new_allocator(falls: bool) -> CachingAllocator:
        return CachingAllocator(64 * MiB, AllocatorConfig(retries=False, falls=falls))

    def run(size: int) -> Outcome:
        asked.append(size)
        fits = outcomes[size].fits
        return outcome_of(size, fits, 60 * MiB)._replace(
            trace=trace(size) if fits else Trace(trace(size).events[:-1])
        )

    asked: list[int] = []
    outcomes = {size: replay(trace(size), new_allocator(falls)) for size in range(1, 41)}
    predictions = Replay(
        lambda: new_allocator(False),
        Program.fit([(size, trace(size)) for size in (2, 3)]),
        other_allocators=[lambda: new_allocator(True)],
    )
    found = search(run, cap=40, replay=predictions)
    largest = max(size for size, outcome in outcomes.items() if outcome.fits)
    assert largest == (12 if is_first is not falls else 20)
    assert found.micro_batch == largest
    assert found.upper_bound_by in ("run", "replay")
    assert len(asked) <= 3


def test_the_time_limit_gives_the_largest_size_so_far() -> None:
    machine = Machine(lambda size: size)
    found = search(
        machine.run,
        cap=10**6,
        replay=Wrong(10, 1),
        stopped=lambda: "time limit" if len(machine.asked) >= 2 else None,
    )
    assert found.micro_batch == max(machine.asked)
    assert found.upper_bound_by is None
    assert found.stopped_by == "time limit"


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_gives_the_largest_size_so_far_and_a_termination_none(after: int) -> None:
    machine = Machine(lambda size: size)

    def run(size: int, error: type[BaseException] = KeyboardInterrupt) -> Outcome:
        if len(machine.asked) == after:
            raise error
        return machine.run(size)

    with pytest.raises(Terminated):
        search(lambda size: run(size, Terminated), cap=10**6, replay=Wrong(10, 1))
    machine.asked.clear()
    found = search(run, cap=10**6, replay=Wrong(10, 1))
    assert found.stopped_by == "interrupt"
    assert found.micro_batch == max(machine.asked, default=0)


# Sizes that fail for another reason than memory.


def insisting(multiple: int, limit: int, *, most: int = 10**9) -> Machine:
    """Return a machine that runs multiples of a number only, and none above ``most``."""
    machine = Machine(lambda size: size * BUDGET // (limit + 1) + size)

    def run(size: int) -> Outcome:
        outcome = Machine.run(machine, size)
        if size % multiple == 0 and size <= most:
            return outcome
        failed = outcome_of(size, False, None)
        attempt = msgspec.structs.replace(failed.attempt, phase=None, is_error=True)
        return failed._replace(attempt=attempt, error=AssertionError(f"{size} is no multiple of {multiple}"))

    machine.run = run  # type: ignore[method-assign]
    return machine


@pytest.mark.parametrize("multiple", [2, 4, 8, 6])
@pytest.mark.parametrize("likely", [None, 13, 23, 100])
def test_the_multiple_that_a_workload_insists_on_is_found(multiple: int, likely: int | None) -> None:
    """6 ranks share each micro-batch in a workload that knows their number."""
    machine = insisting(multiple, 54)
    limit = max(size for size in range(multiple, 200, multiple) if machine.fits(size))
    replay = replay_of() if likely is None else Wrong(likely, 1)
    found = search(machine.run, cap=1000, replay=replay, multiples=(2, 4, 6, 8))
    assert (found.micro_batch, found.multiple) == (limit, multiple)
    assert found.upper_bound_by == "run"


def test_a_multiple_that_is_given_is_kept() -> None:
    machine = insisting(3, 54)
    found = search(machine.run, cap=1000, replay=Wrong(40, 1), multiple=3)
    assert (found.micro_batch, found.multiple) == (54, 3)
    assert all(size % 3 == 0 for size in machine.asked)
    assert search(insisting(3, 500).run, cap=32, replay=Wrong(40, 1), multiple=3).micro_batch == 30


def test_an_error_at_every_size_from_one_on_is_a_bound_and_at_every_size_is_raised() -> None:
    machine = insisting(1, 1000, most=76)
    found = search(machine.run, cap=500, replay=Wrong(300, 3))
    assert (found.micro_batch, found.multiple, found.upper_bound_by) == (76, 1, "error")
    with pytest.raises(AssertionError, match="is no multiple of 1000000"):
        search(insisting(10**6, 1000).run, cap=500, replay=Wrong(300, 3))


def test_a_line_through_two_runs_proves_nothing() -> None:
    """As with packed sequences, the bytes depend on values: they grow, but on no line."""
    rules = [lambda m: 40 * m + 300 * (m % 3 == 2), lambda m: 7 * m]
    machine = machine_of(*rules)
    found = find(machine, 1000)
    assert found.upper_bound_by == "run"
    assert_proven(machine, found, 1000)
