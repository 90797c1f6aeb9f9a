"""Sharded tensors are taken out of nested containers, and come back to their places."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autobatch.distributed.sharding.state import shard_like
from autobatch.training.resume import capture_loop
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import block_workload, sharded_loop, step_together
from tests.support.training import make_loop


def like_parameters() -> list[str]:
    """Shard the state of one process, with an entry of another shape, and return its placements."""
    group = open_group()
    whole = make_loop(block_workload(), ema=0.9)
    step_together(whole, 1)
    state = capture_loop(whole)
    state["optimizers"][0]["state"][0]["column"] = torch.ones(5)
    loop = sharded_loop(group, block_workload(), ema=0.9)
    found = shard_like(loop.train_state, state, loop.engine.mesh)
    own = found["optimizers"][0]["state"][0]
    assert not isinstance(own["step"], DTensor)
    assert not isinstance(found["model"]["offset"], DTensor)
    assert torch.equal(own["exp_avg"].full_tensor(), state["optimizers"][0]["state"][0]["exp_avg"])
    tensors = [found["model"]["mix.weight"], found["average"]["averages"][0], own["exp_avg"], own["column"]]
    placements = [str(one.placements) for one in tensors]
    group.close()
    return placements


@pytest.mark.distributed
def test_whole_tensors_are_sharded_as_their_parameters(server: RankServer) -> None:
    cut, same = str((Shard(0),)), str((Replicate(),))
    assert server.values(like_parameters, world=3) == [[cut, cut, cut, same]] * 3
