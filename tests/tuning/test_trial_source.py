"""Trials: in a process that they crash, and on several ranks together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.knobs import Configuration
from autobatch.setup.child import ChildProcess
from autobatch.setup.setup import SetupSettings
from autobatch.tuning.configuration import LOSS, MEMORY, RUNS, Measurement, infeasible
from autobatch.tuning.trial import look_at_workload
from autobatch.tuning.trial_source import OwnTrials, SharedTrials, slowest
from tests.support.commandline import SMALL
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.trials import task_with

CRASHES = """
import ctypes
def crashing(model, batch):
    if torch.is_autocast_enabled("cpu"):
        ctypes.string_at(0)
    return loss(model, batch)
def workload():
    return small(loss=crashing)
"""


@pytest.mark.usefixtures("warm_children")
def test_a_trial_that_crashes_its_process_is_infeasible_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{CRASHES}\n")
    values: dict[str, Any] = {"micro_batch_shift": 0, "precision": "fp32"}
    task = task_with(limit=8, cap=32, samples=32, planned_steps=10, defaults=values)
    with ChildProcess(f"{path}:workload", SetupSettings(device="cpu", memory_budget="64MiB")) as child:
        assert child.call("a look", look_at_workload, task).optimizers == ("default", "foreach", "fused")
        trials = OwnTrials(child, task)
        assert trials.measure(values).feasible
        refused = trials.measure({**values, "precision": "bf16"})
        assert refused.constraints == {RUNS: 1.0}
        assert "(SIGSEGV)" in (refused.failure or "")
        assert "\n" not in (refused.failure or "")
        assert trials.measure(values).feasible
        assert trials.confirm_fits(values) is None


def test_a_step_ends_with_the_slowest_rank() -> None:
    found = slowest([Measurement(30.0, 8), Measurement(20.0, 4), Measurement(99.0, 1)], [60, 30, 0])
    assert (found.samples_per_s, found.micro_batch) == (45.0, 8)


def test_a_configuration_that_fails_on_one_rank_fails() -> None:
    found = slowest([Measurement(30.0, 8), infeasible(MEMORY, "full", over=math.inf)], [4, 4])
    assert (found.feasible, found.failure) == (False, "rank 1: full")


@dataclass
class FakeTrials:
    """Trials whose speed, size and failures depend on the rank."""

    rank: int

    def measure(self, values: Configuration) -> Measurement:
        if values["x"] == 2 and self.rank == 1:
            return infeasible(LOSS, "it differs", over=math.inf)
        return Measurement(100.0 / (1 + self.rank), 8 >> self.rank)

    def confirm_fits(self, values: Configuration) -> str | None:
        return "too large" if values["x"] == 3 and self.rank == 1 else None


def tune_together() -> Any:
    """Ask on rank 0 and follow on the other; return what each knows at the end."""
    group = open_group()
    trials = SharedTrials(FakeTrials(group.rank), group, [6, 6])
    if group.rank:
        answer = trials.follow()
    else:
        fast, fails = trials.measure({"x": 1}), trials.measure({"x": 2})
        answer = [fast.samples_per_s, fails.failure, fails.constraints[LOSS] == math.inf]
        answer += [trials.confirm_fits({"x": 1}), trials.confirm_fits({"x": 3})]
        trials.end(answer)
    found = answer, trials.micro_batch({"x": 1}), trials.micro_batch({"x": 2 + group.rank})
    group.close()
    return found


@pytest.mark.distributed
def test_ranks_measure_what_rank_0_asks_for(server: RankServer) -> None:
    answer = [100.0, "rank 1: it differs", True, None, "too large"]
    assert server.values(tune_together) == [(answer, 8, 8), (answer, 4, None)]
