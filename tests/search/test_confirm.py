"""A batch over all ranks in their children takes the memory of the training, or is an answer too."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.records.probe import Attempt
from autobatch.distributed.meeting import MeetingPlace
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.search.confirm import JointBatch, joint_batch, run_joint_batch
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import SetupSettings, open_setup
from tests.support.rank_server import RankServer
from tests.support.training import make_workload, points

MIB = 2**20


def test_a_joint_batch_has_the_largest_micro_batches_of_each_rank() -> None:
    of_ranks = [[8, 8, 7], [4, 4, 4], [4]]
    joint = [joint_batch(of_ranks, rank, "auto") for rank in range(3)]
    assert joint[0] == JointBatch(0, 32, [8, 4, 4], "auto")
    assert [one.sizes() for one in joint] == [[8, 8], [4, 4], [4, 4]]


def test_a_rank_without_samples_takes_one_here() -> None:
    joint = [joint_batch([[1], [], []], rank, "after") for rank in range(3)]
    assert [one.sizes() for one in joint] == [[1], [1], [1]]


def wide() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(5, 256), nn.Sequential(*blocks), nn.Linear(256, 3))


def confirm(parallel: str, budgets: list[str], sizes: list[int], grad_sync: str) -> Attempt:
    """Run a batch over the ranks, each of which is its own child."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workload = make_workload(
        model=wide,
        train_data=points(dtype=torch.float32),
        optimizer=lambda params, rate: torch.optim.Adam(params, lr=rate),
    )
    shard = ShardLayout(world=world) if parallel == "shard" else None
    settings = SetupSettings(device="cpu", memory_budget=budgets[rank], world=world, shard=shard)
    process = ThisProcess(open_setup(workload, settings))
    place = MeetingPlace(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), "test", rank, world)
    batch = joint_batch([sizes, *[sizes[:-1]] * (world - 1)], rank, grad_sync)  # type: ignore[arg-type]
    return run_joint_batch(process, place, batch)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallel", "grad_sync"),
    [
        ("shard", "auto"),
        ("replicate", "after"),
        pytest.param("replicate", "overlap", marks=pytest.mark.slow),
    ],
)
def test_a_batch_over_all_ranks_is_an_attempt(server: RankServer, parallel: str, grad_sync: str) -> None:
    found = server.values(confirm, parallel, ["1GiB", "1GiB"], [4, 4], grad_sync)
    peaks = [one.peak_allocated_bytes for one in found]
    for one in found:
        assert (one.fits, one.reason, one.micro_batch, one.world) == (True, None, 4, 2)
    # Weights, gradients and two moments of Adam, of 264,707 parameters; a half of each if they are shared.
    whole = 4 * 4 * 264_707
    least = whole // 2 if parallel == "shard" else whole
    assert all(least < peak < 2 * whole for peak in peaks if peak is not None)


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["shard", "replicate"])
def test_out_of_memory_on_one_rank_is_an_answer_of_all(server: RankServer, parallel: str) -> None:
    ended = server.run(confirm, parallel, ["1GiB", "2MiB"], [4, 4], "auto", seconds=20)
    failed: Any = ended[1].value
    assert not failed.fits
    assert "out of memory" in failed.reason
    # The other is its own child here: it has answered that it waited for a rank, or has ended itself.
    assert ended[0].code == 1 or (ended[0].value.fits, ended[0].value.reason) == (False, None)
