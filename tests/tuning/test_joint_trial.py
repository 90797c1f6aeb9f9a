"""Trials of a shared model over real ranks, whose processes may run out of memory or die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import autobatch
from autobatch.core.knobs import CHECKPOINTING, SPLIT
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.setup.open_process import open_process
from autobatch.setup.setup import SetupSettings
from autobatch.tuning.joint_trial import JointTrials
from autobatch.tuning.trial_source import SharedTrials
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.training import make_workload, points
from tests.support.trials import task_with

pytestmark = pytest.mark.distributed
RANK = "RANK"
DEFAULTS = {SPLIT: 0, CHECKPOINTING: "none"}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def workload(fault: str = "") -> autobatch.Workload:
    """Return a workload that fails on the second rank beside other ranks, in micro-batches of two samples."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        import torch.distributed as dist

        meets = torch.is_grad_enabled() and dist.is_initialized() and dist.get_backend() == "gloo"
        if fault and meets and os.environ[RANK] == "1" and len(batch[0]) == 2:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return make_workload(model=Blocks, train_data=points(24, dtype=torch.float32), loss=loss, name="blocks")


def measure(fault: str, asked: list[dict[str, Any]]) -> list[Any]:
    """Measure configurations over the ranks, in copies of their processes."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    group = open_group()
    shard = ShardLayout(world=group.world)
    settings = SetupSettings(device="cpu", memory_budget="1GiB", world=group.world, shard=shard)
    task = task_with(limit=4, cap=4, samples=8, defaults=DEFAULTS)
    with open_process(workload(fault), settings, isolated=False) as process:
        trials = SharedTrials(JointTrials(process, task, group, 16), group, [8, 8])
        if group.rank:
            found = trials.follow()
        else:
            measured = [trials.measure({**DEFAULTS, **values}) for values in asked]
            fits = trials.confirm_fits({**DEFAULTS, **asked[-1]})
            found = [[one.feasible, one.micro_batch, one.failure] for one in measured], fits
            trials.end(found)
    group.close()
    return list(found)


@pytest.mark.program
def test_ranks_time_a_shared_model_together(server: RankServer) -> None:
    first, second = server.values(measure, "", [{}, {SPLIT: 1, CHECKPOINTING: "full"}])
    assert first == second
    assert first == [[[True, 4, None], [True, 2, None]], None]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("full", "rank 1: CUDA out of memory."),
        pytest.param(
            "dies",
            "rank 1: the child process ended during a trial over all ranks (SIGKILL)",
            marks=pytest.mark.program,
        ),
    ],
)
def test_a_trial_that_fails_on_one_rank_fails_on_all_and_the_next_one_runs(
    server: RankServer, fault: str, failure: str
) -> None:
    (found, fits), _ = server.values(measure, fault, [{}, {SPLIT: 1}, {}])
    assert [one[0] for one in found] == [True, False, True]
    assert found[1][2].startswith(failure)
    assert fits is None
