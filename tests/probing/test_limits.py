"""Predictions from what ran: lines, parabolas, sizes that are rounded, steps that change, and nothing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autobatch.core.records import Attempt
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.program import Program
from autobatch.probing.attempt import Outcome
from autobatch.probing.limits import ReplayPredictor, has_ample_room, peak_bytes
from autobatch.probing.search import search
from tests.probing.test_search import BUDGET, Machine, outcome_of

Rule = Callable[[int], int]


def trace_of(*rules: Rule) -> Callable[[int], Trace]:
    """Blocks that are taken one after the other, and of which two live at a time."""

    def trace(size: int) -> Trace:
        events: list[tuple[int, int]] = []
        for block, rule in enumerate(rules):
            events.append((block, rule(size)))
            if block:
                events.append((block - 1, FREE))
        return Trace(tuple(events), ((0, "forward"),))

    return trace


def memory_of(*rules: Rule) -> Rule:
    return lambda size: max(
        a + b for a, b in zip([r(size) for r in rules], [*(r(size) for r in rules[1:]), 0], strict=True)
    )


def machine_of(*rules: Rule) -> Machine:
    return Machine(memory_of(*rules), trace_of(*rules))


def limit_of(machine: Machine, cap: int) -> int:
    return max((size for size in range(1, cap + 1) if machine.fits(size)), default=0)


def forecast_of(trace_footprint: Program | None = None) -> ReplayPredictor:
    return ReplayPredictor(lambda: CountingAllocator(BUDGET), trace_footprint)


@given(
    square=st.integers(1, 30), slope=st.integers(0, 200), fixed=st.integers(1, 4000),
    flat=st.integers(1, 4000), cap=st.integers(4, 400),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_memory_that_grows_with_the_square_is_told_from_three_runs(square, slope, fixed, flat, cap) -> None:
    machine = machine_of(lambda m: square * m * m + fixed, lambda m: slope * m + flat, lambda m: 8 * m + 8)
    limit = limit_of(machine, cap)
    assume(limit >= 8)
    found = search(machine.run, cap=cap, predictor=forecast_of())
    assert found.micro_batch == limit
    if found.upper_bound_by == "cap":
        assert limit == cap
    assert len(machine.asked) <= 7
    # Memory may outgrow the proportion by which the second size is chosen; what is predicted after it fits.
    assert machine.ooms <= 2


def rounded(to: int, each: int) -> Rule:
    return lambda m: -(-m // to) * to * each


@given(
    to=st.sampled_from([2, 4, 8, 16, 32, 64]), each=st.integers(1, 40), slope=st.integers(0, 60),
    fixed=st.integers(1, 9000), cap=st.integers(1, 600),
)  # fmt: skip
@example(to=2, each=24, slope=13, fixed=1837, cap=220)
@settings(max_examples=300, deadline=None)
def test_sizes_that_a_library_rounds_up_are_shown_by_runs(to, each, slope, fixed, cap) -> None:
    machine = machine_of(lambda m: slope * m + fixed, rounded(to, each), lambda _: 16)
    found = search(machine.run, cap=cap, predictor=forecast_of())
    assert found.micro_batch == limit_of(machine, cap)
    if found.upper_bound_by == "run":
        assert found.micro_batch + 1 in machine.asked
    elif found.upper_bound_by == "replay":
        assert not machine.fits(found.micro_batch + 1)


@given(kink=st.integers(1, 300), slope=st.integers(1, 40), extra=st.integers(1, 60), cap=st.integers(1, 600))
@settings(max_examples=300, deadline=None)
def test_a_step_whose_events_change_with_the_size(kink, slope, extra, cap) -> None:
    """From some size on an operator takes a workspace: what smaller runs say does not hold there."""
    small = (lambda m: slope * m + 50, lambda m: 4 * m + 4)
    large = (*small, lambda m: extra * m + 1000)
    machine = Machine(
        lambda m: memory_of(*(large if m >= kink else small))(m),
        lambda m: trace_of(*(large if m >= kink else small))(m),
    )
    found = search(machine.run, cap=cap, predictor=forecast_of())
    answer = found.micro_batch
    assert answer == 0 or (answer in machine.asked and machine.fits(answer))
    assert answer or not machine.fits(1)
    if found.upper_bound_by == "run":
        assert not machine.fits(answer + 1)


@given(slope=st.integers(1, 400), fixed=st.integers(0, BUDGET), cap=st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_peaks_alone_find_a_line_in_few_runs(slope, fixed, cap) -> None:
    machine = Machine(lambda m: slope * m + fixed)
    found = search(machine.run, cap=cap, predictor=forecast_of())
    assert found.micro_batch == limit_of(machine, cap)
    assert found.upper_bound_by in ("run", "cap", None)
    assert len(machine.asked) <= 8


def test_no_figures_at_all_is_plain_bisection() -> None:
    asked: list[int] = []

    def run(size: int):
        asked.append(size)
        return outcome_of(size, size <= 777, None)

    found = search(run, cap=100_000, predictor=forecast_of())
    assert (found.micro_batch, found.upper_bound_by) == (777, "run")
    assert len(asked) <= 24


# When a replay may say that the next size does not fit.


def test_two_runs_make_a_line_and_the_third_makes_it_count() -> None:
    machine = machine_of(lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    predictor = forecast_of()
    limit = limit_of(machine, 10_000)
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
    limit = limit_of(machine, 10_000)
    program = Program.fit([(size, trace_of(*rules)(size)) for size in (2, 3)])
    larger = Program.fit([(size, trace_of(lambda m: 100 * m, rules[1])(size)) for size in (2, 3)])

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


@pytest.mark.parametrize(
    ("micro_batch", "peak", "ample"),
    [(2, 100, True), (2, 500, True), (2, 540, False), (300, 790, True), (300, 990, False), (1, 450, False)],
)
def test_ample_room_is_far_more_than_one_sample_more(micro_batch: int, peak: int, ample: bool) -> None:
    ran = outcome_of(micro_batch, True, peak).attempt
    assert has_ample_room(ran, 1000) is ample
    assert not has_ample_room(outcome_of(micro_batch, True, None).attempt, 1000)


def test_a_prior_that_is_right_needs_one_run() -> None:
    rules = (lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    machine = machine_of(*rules)
    trace_footprint = Program.fit([(size, trace_of(*rules)(size)) for size in (2, 3)])
    found = search(machine.run, cap=10_000, predictor=forecast_of(trace_footprint))
    assert (found.micro_batch, found.upper_bound_by) == (limit_of(machine, 10_000), "replay")
    assert machine.asked == [found.micro_batch]


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.1, 4.0])
def test_a_prior_that_is_wrong_is_left_behind(factor: float) -> None:
    machine = machine_of(lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    wrong = trace_of(lambda m: round(90 * factor) * m + 100, lambda m: 5 * m + 5)
    trace_footprint = Program.fit([(size, wrong(size)) for size in (2, 3)])
    found = search(machine.run, cap=10_000, predictor=forecast_of(trace_footprint))
    assert found.micro_batch == limit_of(machine, 10_000)
    assert len(machine.asked) <= 5


def test_a_prior_that_says_nothing_fits_is_put_to_the_test_by_two_samples_first() -> None:
    machine = machine_of(lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    wrong = trace_of(lambda m: 90 * m + 10 * BUDGET)
    trace_footprint = Program.fit([(size, wrong(size)) for size in (2, 3)])
    found = search(machine.run, cap=10_000, predictor=forecast_of(trace_footprint))
    assert machine.asked[0] == 2
    assert found.micro_batch == limit_of(machine, 10_000)
    nothing = machine_of(lambda m: 90 * m + BUDGET)
    assert search(nothing.run, cap=50, predictor=forecast_of(trace_footprint)).micro_batch == 0
    assert nothing.asked == [2, 1]


def test_what_is_reserved_counts_where_something_is() -> None:
    def attempt(allocated: int | None, reserved: int | None) -> Attempt:
        return Attempt(
            micro_batch=1,
            fits=True,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            seconds=0.0,
        )

    assert [peak_bytes(attempt(*pair)) for pair in ((3, None), (3, 8), (None, None))] == [3, 8, None]


def test_what_ran_and_was_refused_all_the_same_is_followed_by_its_near_neighbours() -> None:
    """Events that are right, and an allocator in pieces: sizes close to the limit run in one order only."""
    rules = (lambda m: 90 * m + 100, lambda m: 5 * m + 5)
    trace_footprint = Program.fit([(size, trace_of(*rules)(size)) for size in (2, 3)])
    machine = machine_of(*rules)
    limit = limit_of(machine, 10_000)

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if size <= limit - 6 or not outcome.attempt.fits:
            return outcome
        return Outcome(msgspec.structs.replace(outcome.attempt, fits=False), outcome.trace)

    found = search(run, cap=10_000, predictor=forecast_of(trace_footprint))
    assert (found.micro_batch, found.upper_bound_by) == (limit - 6, "run")
    assert len(machine.asked) <= 7
