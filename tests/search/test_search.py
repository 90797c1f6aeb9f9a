"""The search against brute force, over thousands of memory functions."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.cli.failures import Terminated
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.search.limits import ReplayPredictor
from autobatch.search.search import Found, search
from autobatch.setup.attempt import Outcome
from tests.support.sizes import BUDGET, Machine, machine_of, outcome_of, predictor_of, program_of, trace_of


def find(machine: Machine, cap: int) -> Found:
    return search(machine.run, cap=cap, predictor=predictor_of())


@given(
    values=st.lists(st.integers(0, 2 * BUDGET), min_size=1, max_size=60),
    cap=st.integers(1, 60),
)
@settings(max_examples=1000, deadline=None)
def test_any_memory_function_gives_a_size_that_ran_below_one_that_does_not_fit(values, cap) -> None:
    """Noise, plateaus, cliffs and holes: the runs prove the answer for any function."""
    machine = Machine(lambda size: values[min(size, len(values)) - 1])
    found = find(machine, cap)
    assert len(machine.asked) == len(set(machine.asked)), "no size is tried twice"
    assert all(1 <= size <= cap for size in machine.asked)
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
    fixed=st.integers(0, BUDGET + 100),
    slope=st.integers(0, BUDGET),
    late=st.integers(0, 3),
    kink=st.integers(1, 2000),
    cap=st.integers(1, 5000),
)
@settings(max_examples=1000, deadline=None)
def test_monotone_memory_gives_exactly_the_limit_in_few_runs(fixed, slope, late, kink, cap) -> None:
    def memory(size: int) -> int:
        return fixed + slope * size // 64 + late * slope * max(0, size - kink) // 64

    machine = Machine(memory)
    found = find(machine, cap)
    assert found.micro_batch == machine.limit(cap)
    assert len(machine.asked) <= 2 * math.log2(cap + 1) + 8


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2000)), min_size=1, max_size=12),
    cap=st.integers(1, 4000),
)
@settings(max_examples=300, deadline=None)
def test_replayed_events_avoid_out_of_memory_errors(sizes, cap) -> None:
    machine = machine_of(*(lambda m, a=slope, b=constant: a * m + b for slope, constant in sizes))
    found = find(machine, cap)
    limit = machine.limit(cap)
    assert found.micro_batch == limit
    assert len(machine.asked) <= 4
    # Only the first size may be too large, because predicted sizes fit.
    assert machine.ooms == (0 if limit >= min(2, cap) else len(machine.asked) - (limit > 0))


def test_runs_correct_a_wrong_prediction() -> None:
    """The events have half of the size that the memory has."""
    machine = Machine(lambda size: 10 * size + 20, trace_of(lambda size: 5 * size + 10))
    found = find(machine, 100_000)
    assert found.micro_batch == (BUDGET - 20) // 10
    assert found.upper_bound_by == "run"


def test_the_time_limit_gives_the_largest_size_so_far() -> None:
    machine = Machine(lambda size: size)
    found = search(
        machine.run,
        cap=10**6,
        predictor=predictor_of(),
        stopped=lambda: "time limit" if len(machine.asked) >= 2 else None,
    )
    assert found.micro_batch == max(machine.asked)
    assert found.upper_bound_by is None
    assert found.stopped_by == "time limit"


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_gives_the_largest_size_so_far(after: int) -> None:
    machine = Machine(lambda size: size)

    def run(size: int) -> Outcome:
        if len(machine.asked) == after:
            raise KeyboardInterrupt
        return machine.run(size)

    found = search(run, cap=10**6, predictor=predictor_of())
    assert found.stopped_by == "interrupt"
    assert found.micro_batch == max(machine.asked, default=0)


def test_a_termination_is_raised() -> None:
    machine = Machine(lambda size: size)

    def run(size: int) -> Outcome:
        if machine.asked:
            raise Terminated
        return machine.run(size)

    with pytest.raises(Terminated):
        search(run, cap=10**6, predictor=predictor_of())


def test_attempts_without_figures_are_bisected() -> None:
    asked: list[int] = []

    def run(size: int) -> Outcome:
        asked.append(size)
        return outcome_of(size, size <= 777, None)

    found = search(run, cap=100_000, predictor=predictor_of())
    assert (found.micro_batch, found.upper_bound_by) == (777, "run")
    assert len(asked) <= 24


def test_sizes_just_below_one_that_failed_narrowly_are_tried_next() -> None:
    """The events are right, but the allocator is fragmented: sizes near the limit run in one order only."""
    rules = (lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    machine = machine_of(*rules)
    limit = machine.limit(10_000)

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if size <= limit - 6 or not outcome.attempt.fits:
            return outcome
        return Outcome(msgspec.structs.replace(outcome.attempt, fits=False), outcome.trace)

    found = search(run, cap=10_000, predictor=predictor_of(program_of(*rules)))
    assert (found.micro_batch, found.upper_bound_by) == (limit - 6, "run")
    assert len(machine.asked) <= 7


def test_a_prediction_below_a_size_that_failed_is_taken() -> None:
    """Reserved memory is not monotone: a model of the allocator may let 248 fit, and 237 to 247 not."""

    class Gapped(ReplayPredictor):
        """A prediction that is wrong above a gap, and right below it."""

        def largest(self, cap: int) -> int | None:
            return 248 if cap >= 248 else min(cap, 236)

        def proves_next_fails(self, micro_batch: int) -> bool:
            return micro_batch == 236

    machine = Machine(lambda size: 0 if size <= 240 else 2 * BUDGET)
    found = search(machine.run, cap=4096, predictor=Gapped(lambda: CountingAllocator(BUDGET)))
    assert (found.micro_batch, found.upper_bound_by) == (236, "replay")
    assert machine.asked == [248, 236]


def test_the_next_size_is_run_where_predictions_end() -> None:
    class Approaching(ReplayPredictor):
        """Predictions that come closer with each run."""

        def largest(self, cap: int) -> int | None:
            known = max(self._peaks, default=0)
            return min(known + max(1, (32 - known) // 2), 32, cap)

    machine = Machine(lambda size: 0 if size <= 32 else 2 * BUDGET)
    found = search(machine.run, cap=256, predictor=Approaching(lambda: CountingAllocator(BUDGET)))
    assert (found.micro_batch, found.upper_bound_by) == (32, "run")
    assert machine.asked == [16, 24, 28, 30, 31, 32, 33]
