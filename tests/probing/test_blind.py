"""Searches without a prediction: limits over several magnitudes, and the runs and failures that they take."""

from __future__ import annotations

import math

import pytest

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.probing.attempt import Outcome
from autobatch.probing.blind import MOST_FAILURES, SPARE_RUNS, next_size
from autobatch.probing.limits import ReplayPredictor
from autobatch.probing.search import search
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


@pytest.mark.parametrize("limit", [*range(31, 64), 77, 100, 128, 300, 1000, 5000, 9999])
def test_every_limit_between_two_sizes_is_found(limit: int) -> None:
    runs, failures = solved(31, 10_000, limit, 3)
    if limit <= 100:
        assert runs <= math.log2(limit) + SPARE_RUNS
        assert failures <= MOST_FAILURES
    assert runs <= 2 * math.log2(limit) + SPARE_RUNS


@pytest.mark.parametrize("first_size", [2, 8])
@pytest.mark.parametrize("limit", [2, 5, 13, 20, 37, 50, 64])
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
    assert len(asked) <= math.log2(limit) + SPARE_RUNS
    assert sum(size > limit for size in asked) <= MOST_FAILURES
