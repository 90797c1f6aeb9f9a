"""Figures of a batch: what ranks send, and the totals that each makes of them."""

from __future__ import annotations

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group_engine import figures_of, sum_totals
from autobatch.step.train_step import StepTotals


def test_totals_are_those_of_all_ranks_and_the_first_micro_batch_that_of_rank_0() -> None:
    first = StepTotals(samples=7, loss=1.5, count=3.0, divisor=8.0, sizes=[2, 2], first_count=2.0)
    second = StepTotals(samples=7, loss=0.25, count=4.0, divisor=8.0, sizes=[3], first_count=9.0)
    nothing = StepTotals(samples=7)
    rows = [figures_of(one, signal) for one, signal in ((first, 0), (second, 15), (nothing, 0))]
    assert [row.signal for row in rows] == [0, 15, 0]
    for totals in (first, second, nothing):
        sum_totals(totals, rows)
        assert (totals.loss, totals.count, totals.divisor) == (1.75, 7.0, 8.0)
        assert (totals.first_norm, totals.first_count) == (None, 2.0)


def test_a_rank_without_memory_sends_only_that() -> None:
    assert figures_of(OutOfMemory("full", size=2), 15)[:3] == (1, 15, 0)
