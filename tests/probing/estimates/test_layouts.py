"""Ways in which ranks share a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from autobatch.footprint.tracing.apart import run_apart
from autobatch.probing.estimates.layouts import ALONE, Layout, arranged


def test_one_rank_arranges_nothing():
    with arranged(ALONE, nn.Linear(2, 2)) as how:
        assert how == (None, 1)


def test_replicas_sum_in_a_buffer_beside_small_models_and_in_buckets_of_large_ones():
    with arranged(Layout(4), nn.Linear(2, 2)) as how:
        assert how == (None, 4)
    with torch.device("meta"):
        large = nn.Linear(4096, 4096)
    with arranged(Layout(4), large) as (arrange, world):
        assert arrange is not None
        assert world == 1


def shares_within_the_block() -> list[bool]:
    found = []
    with arranged(Layout(4, "shard"), nn.Linear(2, 2)) as (arrange, world):
        found += [arrange is not None, world == 1, dist.get_world_size() == 4]
    return [*found, not dist.is_initialized()]


def test_a_rank_that_shares_a_model_has_a_group_within_the_block():
    assert run_apart(shares_within_the_block) == [True] * 4
