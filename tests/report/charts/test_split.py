"""The chart of the plan."""

from __future__ import annotations

import pytest

from autobatch.planning import make_plan
from autobatch.report.charts.split import plan_figure


@pytest.mark.parametrize(
    ("target", "limit", "ranks", "rows"),
    [
        (1, 1, 1, [["0", "1", "1 × 1"]]),
        (1024, 93, 1, [["0", "1,024", "4 × 86, 8 × 85"]]),
        (7, 2, 2, [["0", "4", "2 × 2"], ["1", "3", "1 × 2, 1 × 1"]]),
    ],
)
def test_the_plan_shows_the_share_of_each_rank(target, limit, ranks, rows):
    plan = make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, world_size=ranks)
    assert plan_figure(plan).table.rows == rows


def test_many_ranks_and_many_micro_batches_stay_small():
    wide = plan_figure(make_plan(target_batch=4096, micro_batch_limit=8, learning_rate=0.1, world_size=64))
    assert len(wide.table.rows) == 8
    assert "first 8 ranks" in wide.table.caption
    assert wide.note == "The first 8 ranks are shown. The others take as many samples, or one less."
    long = plan_figure(make_plan(target_batch=10_000, micro_batch_limit=1, learning_rate=0.1))
    assert len(long.svg) < 20_000
    assert long.legend[0].label == "all micro-batches (too many to draw one by one)"


def test_a_plan_of_few_ranks_needs_no_note():
    picture = plan_figure(make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1, world_size=2))
    assert picture.note == ""
    assert "rank 1</text>" in picture.svg
    assert picture.description == "8 samples in 1 micro-batch of at most 4 on 2 ranks."
