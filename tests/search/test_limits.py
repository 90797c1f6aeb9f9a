"""Predictions from runs (lines, parabolas, rounded sizes, changing steps) and from traces."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autobatch.core.records.probe import Attempt
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.program import Program
from autobatch.search.limits import ReplayPredictor, first_size
from autobatch.search.peaks import peak_bytes
from autobatch.search.search import search
from autobatch.setup.attempt import Outcome
from tests.support.sizes import (
    BUDGET,
    Machine,
    Rule,
    machine_of,
    memory_of,
    outcome_of,
    predictor_of,
    program_of,
    trace_of,
)


@given(
    square=st.integers(1, 30), slope=st.integers(0, 200), fixed=st.integers(1, 4000),
    flat=st.integers(1, 4000), cap=st.integers(4, 400),
)  # fmt: skip
@example(square=7, slope=0, fixed=69, flat=2761, cap=136)
@example(square=7, slope=196, fixed=69, flat=2729, cap=28)
@example(square=1, slope=168, fixed=62, flat=95, cap=47)
@settings(max_examples=300, deadline=None)
def test_three_runs_find_memory_that_grows_with_the_square(square, slope, fixed, flat, cap) -> None:
    machine = machine_of(lambda m: square * m * m + fixed, lambda m: slope * m + flat, lambda m: 8 * m + 8)
    limit = machine.limit(cap)
    assume(limit >= 8)
    found = search(machine.run, cap=cap, predictor=predictor_of())
    assert found.micro_batch == limit
    if found.upper_bound_by == "cap":
        assert limit == cap
    assert len(machine.asked) <= 7
    # The second size assumes that memory grows at most proportionally. Predicted sizes after it fit.
    assert machine.ooms <= 2


def rounded(to: int, each: int) -> Rule:
    return lambda m: -(-m // to) * to * each


@given(
    to=st.sampled_from([2, 4, 8, 16, 32, 64]), each=st.integers(1, 40), slope=st.integers(0, 60),
    fixed=st.integers(1, 9000), cap=st.integers(1, 600),
)  # fmt: skip
@example(to=2, each=24, slope=13, fixed=1837, cap=220)
@settings(max_examples=300, deadline=None)
def test_runs_prove_the_limit_if_a_library_rounds_sizes_up(to, each, slope, fixed, cap) -> None:
    machine = machine_of(lambda m: slope * m + fixed, rounded(to, each), lambda _: 16)
    found = search(machine.run, cap=cap, predictor=predictor_of())
    assert found.micro_batch == machine.limit(cap)
    if found.upper_bound_by == "run":
        assert found.micro_batch + 1 in machine.asked
    elif found.upper_bound_by == "replay":
        assert not machine.fits(found.micro_batch + 1)


@given(kink=st.integers(1, 300), slope=st.integers(1, 40), extra=st.integers(1, 60), cap=st.integers(1, 600))
@settings(max_examples=300, deadline=None)
def test_a_step_whose_events_change_with_the_size_is_searched_by_runs(kink, slope, extra, cap) -> None:
    """Above some size an operator takes a workspace, which smaller runs do not show."""
    small = (lambda m: slope * m + 50, lambda m: 4 * m + 4)
    large = (*small, lambda m: extra * m + 1000)
    machine = Machine(
        lambda m: memory_of(*(large if m >= kink else small))(m),
        lambda m: trace_of(*(large if m >= kink else small))(m),
    )
    found = search(machine.run, cap=cap, predictor=predictor_of())
    answer = found.micro_batch
    assert answer == 0 or (answer in machine.asked and machine.fits(answer))
    assert answer or not machine.fits(1)
    if found.upper_bound_by == "run":
        assert not machine.fits(answer + 1)


@given(slope=st.integers(1, 400), fixed=st.integers(0, BUDGET), cap=st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_peaks_without_events_find_a_line_in_few_runs(slope, fixed, cap) -> None:
    machine = Machine(lambda m: slope * m + fixed)
    found = search(machine.run, cap=cap, predictor=predictor_of())
    assert found.micro_batch == machine.limit(cap)
    assert found.upper_bound_by in ("run", "cap", None)
    assert len(machine.asked) <= 8


def machine_with_scratch(slope: int, fixed: int, appears: int, tile: int) -> Machine:
    """Return a step of two tensors, with scratch in tiles between them that appears past a size."""

    def trace(m: int) -> Trace:
        scratch = -(-m // tile) * tile if m >= appears else 0
        between = [(1, scratch), (1, FREE)] if scratch else []
        return Trace(((0, slope * m + fixed), *between, (2, 3 * m), (0, FREE), (3, 5)))

    return Machine(lambda m: replay(trace(m), CountingAllocator()).peak_allocated_bytes, trace)


@given(
    slope=st.integers(3, 120), fixed=st.integers(0, 4000), appears=st.integers(9, 3000),
    tile=st.sampled_from([1, 16, 64, 256, 1000]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_scratch_of_libraries_costs_few_runs(slope, fixed, appears, tile) -> None:
    machine = machine_with_scratch(slope, fixed, appears, tile)
    limit = machine.limit(10_000)
    assume(limit >= 60)
    predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=8)
    found = search(machine.run, cap=10_000, predictor=predictor)
    assert found.micro_batch == limit
    assert machine.asked[0] == 8
    # The next size is the first with scratch, or the first with one tile more, in the worst case.
    assert len(machine.asked) <= math.log2(limit) + 8


def test_a_search_on_a_gpu_begins_past_the_sizes_at_which_its_libraries_differ() -> None:
    """Below 6 samples a kernel keeps another block, so that a run at 2 tells nothing of larger sizes."""

    def trace(m: int) -> Trace:
        small = [(9, 50)] if m < 6 else []
        return Trace((*small, (0, 90 * m + 100), (1, 3 * m), (0, FREE), (2, 5)))

    runs = {}
    for capability in ((9, 0), None):
        machine = Machine(lambda m: replay(trace(m), CountingAllocator()).peak_allocated_bytes, trace)
        predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=first_size(capability))
        assert search(machine.run, cap=400, predictor=predictor).micro_batch == machine.limit(400)
        runs[capability] = len(machine.asked)
    assert runs[9, 0] == 3 < runs[None]


def test_two_bounds_that_agree_prove_that_the_next_size_fails() -> None:
    machine = machine_with_scratch(90, 100, 9, 16)
    limit = machine.limit(10_000)
    predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=8)
    for size in (8, 37):
        predictor.learn(machine.run(size))
        assert not predictor.proves_next_fails(size)
    predictor.learn(machine.run(limit))
    assert predictor.proves_next_fails(limit)
    assert not predictor.proves_next_fails(limit - 1), "the largest run is not there"


def test_a_refusal_after_scratch_makes_the_prediction_careful() -> None:
    machine = machine_with_scratch(90, 100, 9, 16)
    predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=8)
    for size in (8, 20, 37):
        predictor.learn(machine.run(size))
    first = predictor.largest(10_000)
    guesses = [first]
    for _ in range(2):
        predictor.learn(outcome_of(guesses[-1], False, BUDGET))
        guesses.append(predictor.largest(10_000))
    shares = [1 - guess / first for guess in guesses[1:]]
    assert shares == [pytest.approx(1 / 16, abs=0.01), pytest.approx(1 / 8, abs=0.01)]


def test_bounds_from_two_runs_are_refuted_by_a_refusal() -> None:
    machine = machine_with_scratch(90, 100, 9, 16)
    predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=8)
    for size in (8, 37):
        predictor.learn(machine.run(size))
    guess = predictor.largest(10_000)
    predictor.learn(outcome_of(guess, False, BUDGET))
    assert predictor.largest(10_000) is None
    assert guess < 4 * 37
    assert predictor.next_calibration_size(10_000) == 22, "between the two"
    far = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=8)
    for size in (8, 37):
        far.learn(machine.run(size))
    far.learn(outcome_of(4 * 37 + 1, False, BUDGET))
    assert far.next_calibration_size(10_000) is None, "the next size upward is the third point"


# When a replay may prove that the next size does not fit.


def test_two_runs_fit_a_line_and_a_third_confirms_it() -> None:
    machine = machine_of(lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    predictor = predictor_of()
    limit = machine.limit(10_000)
    for size in (2, 31):
        predictor.learn(machine.run(size))
        assert not predictor.proves_next_fails(limit)
    assert predictor.largest(10_000) == limit
    predictor.learn(machine.run(limit))
    assert predictor.proves_next_fails(limit)
    assert not predictor.proves_next_fails(limit - 1), "the limit itself fits"


def test_one_sample_more_is_judged_by_both_orders_of_an_attempt() -> None:
    rules = (lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    machine = machine_of(*rules)
    limit = machine.limit(10_000)
    program, larger = program_of(*rules), program_of(lambda m: 100 * m, rules[1])

    def next_fits(size: int, program: Program | None, other: Program | None = None) -> bool | None:
        outcome = machine.run(size)
        if other is not None:
            outcome = outcome._replace(other=other.at(size))
        predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), program, lambda: other)
        return predictor.says_next_fits(outcome)

    assert next_fits(limit, program) is False
    assert next_fits(limit - 1, program) is True
    assert next_fits(limit - 1, program, larger) is False
    assert next_fits(limit // 2, program, larger) is True
    assert next_fits(limit, None) is None
    assert next_fits(limit, larger) is None, "a program that the run contradicts says nothing"


def test_a_right_trace_needs_one_run() -> None:
    rules = (lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    machine = machine_of(*rules)
    program = program_of(*rules)
    found = search(machine.run, cap=10_000, predictor=predictor_of(program))
    assert (found.micro_batch, found.upper_bound_by) == (machine.limit(10_000), "replay")
    assert machine.asked == [found.micro_batch]


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.1, 4.0])
def test_a_wrong_trace_is_replaced_by_runs(factor: float) -> None:
    machine = machine_of(lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    program = program_of(lambda m: round(90 * factor) * m + 100, lambda m: 5 * m + 5)
    found = search(machine.run, cap=10_000, predictor=predictor_of(program))
    assert found.micro_batch == machine.limit(10_000)
    assert len(machine.asked) <= 5


def test_two_samples_run_first_if_the_trace_predicts_that_nothing_fits() -> None:
    machine = machine_of(lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    program = program_of(lambda m: 90 * m + 10 * BUDGET)
    found = search(machine.run, cap=10_000, predictor=predictor_of(program))
    assert machine.asked[0] == 2
    assert found.micro_batch == machine.limit(10_000)
    nothing = machine_of(lambda m: 90 * m + BUDGET)
    assert search(nothing.run, cap=50, predictor=predictor_of(program)).micro_batch == 0
    assert nothing.asked == [2, 1]


def test_the_peak_is_reserved_memory_if_the_device_reserves_any() -> None:
    def attempt(allocated: int | None, reserved: int | None) -> Attempt:
        return Attempt(
            micro_batch=1,
            fits=True,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            seconds=0.0,
        )

    assert [peak_bytes(attempt(*pair)) for pair in ((3, None), (3, 8), (None, None))] == [3, 8, None]


def test_runs_whose_order_changes_are_extended_in_proportion() -> None:
    """Each sequence of a packed batch adds its own length, and the longest decides on the events."""
    lengths = [7 + 13 * number % 24 for number in range(400)]

    def trace(size: int) -> Trace:
        own = lengths[:size]
        steps = [30 * sum(length > at for length in own) for at in range(max(own))]
        taken = [(0, 900), *enumerate(steps, 1)]
        return Trace((*taken, *((number, FREE) for number, _ in taken[1:]), (99, 1)), ((1, "forward"),))

    def run(size: int) -> Outcome:
        # Reserved memory shows nothing until a segment is full.
        outcome = outcome_of(size, True, 900 + 30 * sum(lengths[:size]), trace(size))
        return outcome._replace(attempt=msgspec.structs.replace(outcome.attempt, peak_reserved_bytes=BUDGET))

    predictor = predictor_of()
    predictor.learn(run(2))
    second = predictor.next_calibration_size(400)
    assert second == 9
    predictor.learn(run(second))
    assert predictor.next_calibration_size(400) is None
    limit = next(size for size in range(400) if 900 + 30 * sum(lengths[: size + 1]) > BUDGET)
    guess = predictor.largest(400)
    assert guess == pytest.approx(limit, rel=0.2)


def test_neighbours_that_are_alike_by_chance_give_no_line() -> None:
    """The values of the data decide on the order, so that a line through 48 and 49 says nothing of 60."""

    def run(size: int, steps: int, last: int) -> Outcome:
        taken = [(0, 900), *((number, 100 * size // steps) for number in range(1, steps)), (99, last)]
        events = (*taken, *((number, FREE) for number in range(1, steps)))
        return outcome_of(size, True, 900 + 100 * size, Trace(events, ((1, "forward"),)))

    predictor = predictor_of()
    for size, steps in ((2, 3), (7, 4), (32, 5), (48, 6)):
        predictor.learn(run(size, steps, 100 * size // steps))
    alike = run(48, 6, 801)
    predictor.learn(alike._replace(attempt=msgspec.structs.replace(alike.attempt, micro_batch=49)))
    assert predictor.is_rough
    assert (predictor.largest(400) or 0) < 1.2 * (BUDGET - 900) / 100


def test_a_trace_that_was_refuted_leaves_room_once() -> None:
    predictor = predictor_of(program_of(lambda m: 90 * m, lambda m: 10 * m))
    assert predictor.largest(1000) == 100
    predictor.learn(outcome_of(100, False, BUDGET))
    assert predictor.largest(1000) == 93
    predictor.learn(outcome_of(93, False, BUDGET))
    assert predictor.largest(1000) == 100
