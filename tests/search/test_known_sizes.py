"""Predictions from traces of single sizes, before and after runs that confirm or refute them."""

from __future__ import annotations

from autobatch.core.records.probe import Attempt
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import Trace
from autobatch.search.known_sizes import KnownSizes
from autobatch.search.limits import ReplayPredictor
from autobatch.setup.attempt import Outcome

BUDGET = 1_000


def trace(size: int) -> Trace:
    return Trace(((0, 10), (1, 99 * size)), ((1, "forward"),)).canonical()


def outcome(size: int, ran: Trace | None) -> Outcome:
    return Outcome(
        Attempt(
            micro_batch=size,
            fits=ran is not None,
            peak_allocated_bytes=99 * size,
            peak_reserved_bytes=None,
            seconds=0.0,
        ),
        ran,
    )


def known(*sizes: int) -> KnownSizes:
    def allocator() -> CountingAllocator:
        return CountingAllocator(BUDGET)

    return KnownSizes({size: trace(size) for size in sizes}, allocator, ReplayPredictor(allocator))


def test_the_largest_traced_size_that_fits_is_proven_by_a_run_that_agrees() -> None:
    predictor = known(4, 9, 10, 11)
    assert predictor.largest(50) == 10
    assert predictor.largest(9) == 9
    assert predictor.next_calibration_size(50) is None
    assert not predictor.proves_next_fails(10)
    predictor.learn(outcome(10, trace(10)))
    assert predictor.proves_next_fails(10)
    assert not predictor.proves_next_fails(9)


def test_a_size_whose_next_was_not_traced_is_not_proven() -> None:
    predictor = known(8, 10)
    predictor.learn(outcome(10, trace(10)))
    assert not predictor.proves_next_fails(10)


def test_runs_alone_predict_after_one_that_differs() -> None:
    predictor = known(10, 11)
    predictor.learn(outcome(10, trace(9)))
    assert not predictor.proves_next_fails(10)
    assert predictor.next_calibration_size(50) is not None


def test_runs_alone_predict_after_a_size_that_does_not_fit() -> None:
    predictor = known(10, 11)
    predictor.learn(outcome(10, None))
    assert not predictor.proves_next_fails(10)
    assert predictor.largest(50) != 10
