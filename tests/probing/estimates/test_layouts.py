"""Ways in which ranks share a step."""

from __future__ import annotations

import torch.distributed as dist

from autobatch.footprint.tracing.apart import run_apart
from autobatch.probing.estimates.layouts import ALONE, Layout, arranged


def test_one_rank_arranges_nothing():
    with arranged(ALONE) as how:
        assert how == (None, 1)


def test_replicas_sum_in_a_buffer_beside_the_model():
    with arranged(Layout(4)) as how:
        assert how == (None, 4)


def shares_within_the_block() -> list[bool]:
    found = []
    with arranged(Layout(4, "shard")) as (arrange, world):
        found += [arrange is not None, world == 1, dist.get_world_size() == 4]
    return [*found, not dist.is_initialized()]


def test_a_rank_that_shares_a_model_has_a_group_within_the_block():
    assert run_apart(shares_within_the_block) == [True] * 4
