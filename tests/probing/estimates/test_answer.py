"""Sentences of an estimate."""

from __future__ import annotations

from autobatch.core.records.estimate import RankEstimate
from autobatch.probing.estimates.answer import compared_with_runs, fewest_ranks


def row(world: int, budget: int, micro_batch: int) -> RankEstimate:
    return RankEstimate(
        profile=f"gpu-{budget}",
        world_size=world,
        parallel="shard",
        budget_bytes=budget,
        micro_batch=micro_batch,
        peak_reserved_bytes=1,
    )


def test_the_fewest_ranks_are_named_on_the_smallest_gpu():
    table = [row(8, 40, 3), row(4, 80, 2), row(4, 40, 0), row(4, 60, 1)]
    assert fewest_ranks(table) == ", 4 ranks on gpu-60 (a micro-batch of 1 fits there)"
    assert fewest_ranks([row(8, 40, 0)]) == ""


def test_runs_are_compared_by_the_least_and_the_most():
    assert "-1.0% to +25.0% more than predicted (2 compared)" in compared_with_runs("l4", [0.25, -0.01])
