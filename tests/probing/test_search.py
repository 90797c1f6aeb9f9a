"""The search against brute force, over many thousands of memory functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.cli.failures import Terminated
from autobatch.core.records import Attempt
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.probing.attempt import Outcome
from autobatch.probing.limits import ReplayPredictor
from autobatch.probing.search import search

BUDGET = 10_000


def outcome_of(size: int, fits: bool, peak: int | None, trace: Trace | None = None) -> Outcome:
    return Outcome(
        Attempt(
            micro_batch=size,
            fits=fits,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=None,
            seconds=0.0,
            reason=None if fits else "out of memory",
        ),
        trace if fits else None,
    )


class Machine:
    """Runs micro-batches against a memory function, and keeps what was asked."""

    def __init__(self, memory: Callable[[int], int], trace: Callable[[int], Trace] | None = None) -> None:
        self.memory = memory
        self.trace = trace
        self.asked: list[int] = []

    def run(self, size: int) -> Outcome:
        self.asked.append(size)
        peak = self.memory(size)
        trace = self.trace(size) if self.trace else None
        return outcome_of(size, peak <= BUDGET, min(peak, BUDGET), trace)

    def fits(self, size: int) -> bool:
        return self.memory(size) <= BUDGET

    @property
    def ooms(self) -> int:
        return sum(not self.fits(size) for size in self.asked)


def find(machine: Machine, cap: int):
    return search(machine.run, cap=cap, predictor=ReplayPredictor(lambda: CountingAllocator(BUDGET)))


@given(
    values=st.lists(st.integers(0, 2 * BUDGET), min_size=1, max_size=60),
    cap=st.integers(1, 60),
)
@settings(max_examples=3000, deadline=None)
def test_any_memory_function_gives_a_size_that_ran_with_a_neighbour_that_does_not_fit(values, cap) -> None:
    """Noise, plateaus, cliffs and holes: whatever the function, the answer is certified by what ran."""
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
@settings(max_examples=3000, deadline=None)
def test_monotone_memory_gives_exactly_the_limit_in_few_runs(fixed, slope, late, kink, cap) -> None:
    def memory(size: int) -> int:
        return fixed + slope * size // 64 + late * slope * max(0, size - kink) // 64

    machine = Machine(memory)
    found = find(machine, cap)
    limit = max((size for size in range(1, cap + 1) if memory(size) <= BUDGET), default=0)
    assert found.micro_batch == limit
    assert len(machine.asked) <= 2 * math.log2(cap + 1) + 8


def affine_trace(sizes: list[tuple[int, int]]) -> Callable[[int], Trace]:
    """A program of blocks that live together two at a time, each affine in the micro-batch."""

    def trace(micro_batch: int) -> Trace:
        events: list[tuple[int, int]] = []
        for block, (slope, constant) in enumerate(sizes):
            events.append((block, slope * micro_batch + constant))
            if block:
                events.append((block - 1, FREE))
        return Trace(tuple(events), ((0, "forward"),))

    return trace


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2000)), min_size=1, max_size=12),
    cap=st.integers(1, 4000),
)
@settings(max_examples=1000, deadline=None)
def test_recorded_events_are_replayed_so_that_nothing_ever_runs_out_of_memory(sizes, cap) -> None:
    trace = affine_trace(sizes)

    def memory(micro_batch: int) -> int:
        live = [slope * micro_batch + constant for slope, constant in sizes]
        return max(a + b for a, b in zip(live, [*live[1:], 0], strict=True)) if live else 0

    machine = Machine(memory, trace)
    found = find(machine, cap)
    limit = max((size for size in range(1, cap + 1) if memory(size) <= BUDGET), default=0)
    assert found.micro_batch == limit
    assert len(machine.asked) <= 4
    # Only the first size can be too large, before anything is known: what is predicted fits.
    assert machine.ooms == (0 if limit >= min(2, cap) else len(machine.asked) - (limit > 0))


def test_a_prediction_that_is_wrong_is_mended_by_running() -> None:
    """Events that lie: they say that memory is half of what it is."""
    lying = affine_trace([(5, 10)])
    machine = Machine(lambda size: 10 * size + 20, lying)
    found = find(machine, 100_000)
    assert found.micro_batch == (BUDGET - 20) // 10
    assert found.upper_bound_by == "run"


def test_the_time_limit_gives_the_best_size_so_far() -> None:
    machine = Machine(lambda size: size)
    found = search(
        machine.run,
        cap=10**6,
        predictor=ReplayPredictor(lambda: CountingAllocator(BUDGET)),
        expired=lambda: len(machine.asked) >= 2,
    )
    assert found.micro_batch == max(machine.asked)
    assert found.upper_bound_by is None
    assert found.stopped_by == "time limit"


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_gives_the_best_size_so_far(after: int) -> None:
    machine = Machine(lambda size: size)

    def run(size: int) -> Outcome:
        if len(machine.asked) == after:
            raise KeyboardInterrupt
        return machine.run(size)

    found = search(run, cap=10**6, predictor=ReplayPredictor(lambda: CountingAllocator(BUDGET)))
    assert found.stopped_by == "interrupt"
    assert found.micro_batch == max(machine.asked, default=0)


def test_a_termination_is_not_answered_but_passed_on() -> None:
    machine = Machine(lambda size: size)

    def run(size: int) -> Outcome:
        if machine.asked:
            raise Terminated
        return machine.run(size)

    with pytest.raises(Terminated):
        search(run, cap=10**6, predictor=ReplayPredictor(lambda: CountingAllocator(BUDGET)))
