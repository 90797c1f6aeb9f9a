"""The model that the short runs of ranks that share it begin with; the runs are in test_lr_runs.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autobatch.distributed.sharding.build import on_meta
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.setup.child import Session
from autobatch.tuning.joint_lr import FirstModel, keep_first_model
from tests.support.sharded_loops import Blocks, block_workload
from tests.support.trials import setup_of


def a_session() -> Session:
    made = setup_of(replace(block_workload(), model=Blocks))
    return Session(replace(made, layout=ShardLayout(world=2), model=on_meta(made.model)))


def kept(session: Session, rank: int, seed: int = 3) -> nn.Module:
    keep_first_model(session, rank, seed)
    found = session.find(FirstModel)
    assert found is not None
    return found.model


def values(model: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in model.state_dict().values()]


def test_rank_0_builds_the_model_of_the_seed_once() -> None:
    torch.manual_seed(3)
    expected = values(Blocks())
    session, other = a_session(), a_session()
    before = torch.random.get_rng_state()
    first = kept(session, 0)
    assert values(first) == expected
    assert kept(session, 0) is first
    assert values(kept(other, 0, seed=4)) != expected
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("rank", [1, 2])
def test_other_ranks_hold_no_values(rank: int) -> None:
    session = a_session()
    assert kept(session, rank) is session.setup.model
    assert all(one.is_meta for one in kept(session, rank).parameters())
