"""Searches without a prediction: limits over several magnitudes, and the runs and failures that they take."""

from __future__ import annotations

import math

import pytest

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.search.blind import MOST_FAILURES, SPARE_RUNS, most_failures, most_runs, next_size
from autobatch.search.limits import ReplayPredictor
from autobatch.search.search import search
from autobatch.setup.attempt import Outcome
from tests.support.sizes import BUDGET, outcome_of, trace_of

CAP = 40_000


def solved(low: int, high: int, limit: int, runs: int) -> tuple[int, int]:
    """Search between two sizes; return the runs and the failures."""
    failures = 1
    while high - low > 1:
        size = next_size(low, high, runs=runs, failures=failures)
        assert low < size < high
        runs += 1
        if size <= limit:
            low = size
        else:
            high = size
            failures += 1
    assert low == limit
    return runs, failures


@pytest.mark.parametrize("high", [1000, 10_000, 40_000])
@pytest.mark.parametrize("limit", [*range(31, 64), 77, 100, 128, 200, 255, 300, 500, 700, 999])
def test_every_limit_between_two_sizes_is_found(limit: int, high: int) -> None:
    runs, failures = solved(31, high, limit, 3)
    assert runs <= most_runs(limit)
    assert failures <= most_failures(limit)


def test_allowances_are_five_failures_and_six_runs_beside_the_logarithm_up_to_255() -> None:
    assert {most_runs(m) - int(math.log2(m)) for m in range(1, 256)} == {SPARE_RUNS} == {6}
    assert {most_failures(m) for m in range(1, 256)} == {MOST_FAILURES} == {5}
    assert [(most_runs(m), most_failures(m)) for m in (256, 1000, 10_000)] == [(16, 6), (19, 6), (31, 7)]


def told_apart(low: int, failures: int, runs: int) -> int:
    """Count the limits that any search can tell apart with the allowances of a limit below 256."""
    if failures == 0 or runs >= low.bit_length() - 1 + SPARE_RUNS:
        return 1
    below = told_apart(low, failures - 1, runs + 1)
    return below + told_apart(low + below, failures, runs + 1)


def test_no_search_keeps_these_allowances_for_every_limit() -> None:
    assert 31 + told_apart(31, MOST_FAILURES - 1, 3) == 444


@pytest.mark.parametrize("first_size", [2, 8])
@pytest.mark.parametrize("limit", [2, 5, 13, 20, 37, 50, 64, 100, 128, 200, 255, 300, 1000, 5000, 9800])
def test_memory_that_no_replay_sees_costs_few_errors(limit: int, first_size: int) -> None:
    """The events grow by a byte a sample, and the true limit is far below the predicted one."""
    asked: list[int] = []

    def run(size: int) -> Outcome:
        asked.append(size)
        trace = trace_of(lambda m: m + 100, lambda _: 8)(size)
        return outcome_of(size, size <= limit, min(size + 100, BUDGET), trace)

    predictor = ReplayPredictor(lambda: CountingAllocator(BUDGET), first_size=first_size)
    found = search(run, cap=CAP, predictor=predictor)
    assert (found.micro_batch, found.upper_bound_by) == (limit, "run")
    assert len(asked) <= most_runs(limit)
    assert sum(size > limit for size in asked) <= most_failures(limit)
