"""Short runs in a process that they crash, and of ranks that share a model."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch.device.host import HostMemory
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.setup.child import ChildProcess, ThisProcess
from autobatch.setup.open_process import open_process
from autobatch.setup.setup import SetupSettings, open_setup
from autobatch.tuning.find_fastest import Budget, StudyLocation
from autobatch.tuning.find_learning_rate import find_learning_rate
from autobatch.tuning.lead import OTHER_ENDED
from autobatch.tuning.lr_runs import JointRuns, SharedRuns, ShortRuns, common
from autobatch.tuning.lr_trial import LrTrialSpec, Runs, StepLoss, parts_of
from tests.support.commandline import SMALL
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import SAMPLES, Blocks, block_workload

CRASHES = """
import ctypes
def crashing(params, learning_rate):
    if learning_rate > 0.015:
        ctypes.string_at(0)
    return torch.optim.SGD(params, lr=learning_rate)
def workload():
    return small(optimizer=crashing)
"""


@pytest.mark.usefixtures("warm_children")
def test_a_run_that_crashes_its_process_is_infeasible_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{CRASHES}\n")
    task = LrTrialSpec(0.01, 32, 8, "fp32", {}, 4)
    with ChildProcess(f"{path}:workload", SetupSettings(device="cpu", memory_budget="64MiB")) as child:
        runs = ShortRuns(child, task)
        first = list(runs.losses(0.01, 0))
        assert len(first) == 4
        (lost,) = parts_of(runs.losses(0.02, 0), 4)
        assert "(SIGSEGV)" in (lost.failure or "")
        half = runs.losses(0.005, 0)
        next(half)
        half.close()
        assert list(runs.losses(0.01, 0)) == first


TASK = LrTrialSpec(0.001, 7, 4, "fp32", {}, 4)
LIMITS = [2, 1]
"""So one rank has three micro-batches of a batch, and the other two."""
SETTINGS = SetupSettings(device="cpu", memory_budget="1GiB", seed=3)
FAULTY = 0.02
"""Learning rate at which a run fails on the second rank."""


def blocks(fault: str = "") -> autobatch.Workload:
    """Return a workload whose weights follow from the seed, and which may fail on the second rank."""
    rates: list[float] = []

    def optimizer(params: Any, rate: float) -> torch.optim.Optimizer:
        rates[:] = [rate]
        return torch.optim.AdamW(params, lr=rate)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if fault and rates == [FAULTY] and os.environ.get("RANK") == "1":
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cross_entropy(model(batch[0]), batch[1])

    model = lambda: Blocks().double()  # noqa: E731
    return replace(block_workload(), model=model, optimizer=optimizer, loss=loss)


def losses(runs: Runs, rates: list[float]) -> list[list[StepLoss]]:
    """Return the losses of runs; each is on other data, and every second one is left early."""
    found = []
    for number, rate in enumerate(rates):
        run = runs.losses(rate, number)
        found.append([next(run)] if number % 2 else list(run))
        run.close()
    return found


def search(runs: Runs) -> dict[str, Any]:
    """Search in memory, and return the answer without its seconds."""
    place = StudyLocation("study", None, {})
    task = TASK._replace(target_batch=SAMPLES)
    found = find_learning_rate(runs, task, budget=Budget(4), seed=0, place=place)
    return msgspec.to_builtins(msgspec.structs.replace(found, seconds=0.0))


def together(fault: str, samples: int, act: Callable[..., Any], *args: Any) -> Any:
    """Do something with the runs of all ranks, on rank 0, and return its result there."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    group = open_group()
    settings = replace(SETTINGS, world=group.world, shard=ShardLayout(world=group.world))
    settings = replace(settings, holds_model=group.rank == 0)
    with open_process(blocks(fault), settings, isolated=False) as process:
        task = TASK._replace(target_batch=samples)
        runs = SharedRuns(JointRuns(process, task, group, LIMITS, SETTINGS.seed), group)
        if group.rank:
            found = runs.follow()
        else:
            found = act(runs, *args)
            runs.end([])
    group.close()
    return found


def alone(samples: int) -> ShortRuns:
    task = TASK._replace(target_batch=samples)
    return ShortRuns(ThisProcess(open_setup(blocks(), SETTINGS)), task)


@pytest.mark.distributed
def test_ranks_that_share_a_model_have_the_losses_of_one_process(server: RankServer) -> None:
    rates = [0.01, 0.04, 1e300]
    found, _ = server.values(together, "", 7, losses, rates)
    expected = losses(alone(7), rates)
    assert [len(run) for run in found] == [4, 1, len(expected[2])]
    assert found[2][-1].failure == expected[2][-1].failure == "its loss or gradient is not finite"
    for run, other in zip(found, expected, strict=True):
        assert [one.items for one in run] == [one.items for one in other]
        losses_of = [one.loss for one in run]
        assert losses_of == pytest.approx([one.loss for one in other], rel=1e-12, nan_ok=True)


@pytest.mark.distributed
@pytest.mark.program
def test_ranks_that_share_a_model_find_the_learning_rate_of_one_process(server: RankServer) -> None:
    found, _ = server.values(together, "", SAMPLES, search)
    expected = search(alone(SAMPLES))
    assert found["best"] == pytest.approx(expected["best"], rel=1e-12)
    assert found["best"] != TASK.default
    for one, other in zip(found["history"], expected["history"], strict=True):
        assert one["learning_rate"] == pytest.approx(other["learning_rate"], rel=1e-12)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
        assert one["feasible"] == other["feasible"]


def run_twice(runs: Runs) -> list[list[float]]:
    return [[one.loss for one in runs.losses(0.01, 5)] for _ in range(2)]


def draw_parts() -> Any:
    """Run twice with a model that the host has no memory for."""
    Blocks.reset_parameters = lambda self: self.offset.fill_(0.5)  # type: ignore[attr-defined]
    full = HostMemory(2**30, 0, "a test")
    with patch("autobatch.setup.model.host_memory", lambda: full):
        return together("", 7, run_twice)


@pytest.mark.distributed
@pytest.mark.program
def test_ranks_that_draw_their_parts_begin_every_run_with_the_same_weights(server: RankServer) -> None:
    (first, second), _ = server.values(draw_parts)
    assert len(first) == TASK.steps
    assert first == second


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "at", "failure"),
    [
        ("full", 1, "rank 1: CUDA out of memory."),
        # In the first meeting, a cache of torch keeps the connections of a failed rank open.
        pytest.param("full", 0, "rank 1: CUDA out of memory.", marks=pytest.mark.program),
        pytest.param(
            "dies",
            1,
            "rank 1: the child process ended during a trial of a learning rate (SIGKILL)",
            marks=pytest.mark.program,
        ),
    ],
)
def test_a_run_that_fails_on_one_rank_fails_on_all_and_the_next_one_runs(
    server: RankServer, fault: str, at: int, failure: str
) -> None:
    rates = [0.01, 0.01, 0.01]
    rates[at] = FAULTY
    found, _ = server.values(together, fault, 7, losses, rates)
    failed = found.pop(at)
    assert [one.failure for run in found for one in run] == [None] * sum(map(len, found))
    # A child that has been replaced begins with the same weights.
    again = [one.loss for one in losses(alone(7), [0.01, 0.01, 0.01])[-1]]
    assert [one.loss for one in found[-1]] == pytest.approx(again, rel=1e-12)
    (last,) = failed
    assert (last.failure or "").startswith(failure)


def test_ranks_that_fail_alike_are_not_named() -> None:
    fine, lost, full = (StepLoss(1.0, 2.0), StepLoss(0.0, 0.0, OTHER_ENDED), StepLoss(0.0, 0.0, "full"))
    assert common([fine, fine]) == fine
    assert common([None, None]) is None
    assert common([full, full]) == full
    found = common([fine, lost, full])
    assert found is not None
    assert (math.isnan(found.loss), found.failure) == (True, "rank 2: full")
