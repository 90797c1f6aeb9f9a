"""Trials: the knobs that apply, the limit of a configuration, its losses and its speed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.errors import Infeasible
from autobatch.core.options import Options
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ChildProcess, open_process
from autobatch.tuning.learning_rate import short_run
from autobatch.tuning.trial import Trials, call_with
from autobatch.workload.rng import capture_random_state
from tests.support.commandline import SMALL
from tests.support.feeds import loader_workers
from tests.support.training import make_setup, mean_loss
from tests.support.trials import make_trials, signed, trial_setup


def test_micro_batches_and_optimizer_steps_are_timed_apart() -> None:
    """A sample takes a second, and a step of the optimizer five."""
    now = [0.0]

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            now[0] += 5.0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        now[0] += len(batch[0])
        return mean_loss(model, batch)

    made = trial_setup(clock=lambda: now[0], loss=loss, optimizer=lambda params, lr: Slow(params, lr=lr))
    trials = make_trials(made)
    assert trials.measure({}) == pytest.approx(64 / (8 * 8 + 5))
    assert trials.measure({"micro_batch_shift": 2}) == pytest.approx(64 / (64 + 5))


def test_workers_that_are_tuned_or_asked_for_feed_a_trial() -> None:
    seen: set[int] = set()
    trials = make_trials(make_setup(signed(seen)))
    trials.measure({})
    assert seen == {os.getpid()}
    seen.clear()
    before = capture_random_state()
    trials.measure({"loader_workers": 2})
    assert len(seen - {os.getpid()}) == 2
    assert not loader_workers()
    assert torch.equal(capture_random_state().torch, before.torch)
    seen.clear()
    make_trials(make_setup(signed(seen)), workers=1).measure({"micro_batch_shift": 1})
    assert len(seen - {os.getpid()}) == 1


CRASHES = """
import ctypes
def crashing(model, batch):
    if len(batch[0]) == 4:
        ctypes.string_at(0)
    return loss(model, batch)
def workload():
    return small(loss=crashing)
"""


@pytest.mark.usefixtures("warm_children")
def test_a_child_runs_trials_and_short_runs_and_one_that_crashes_it_is_infeasible(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{CRASHES}\n")
    settings = Options(device="cpu", memory_budget="64MiB")
    with open_process(f"{path}:workload", settings, 1, ChildProcess()) as child:
        plan = make_plan(target_batch=32, micro_batch_limit=8, learning_rate=0.01)
        trials = Trials(process=child, plan=plan)
        with pytest.raises(Infeasible, match="SIGSEGV"):
            trials.measure({"micro_batch_shift": 1})
        assert trials.measure({"loader_workers": 2}) > 0
        assert call_with(child, short_run, {}, True, plan, 0, 4) > 0


def test_the_micro_batch_is_the_even_split_halved() -> None:
    trials = make_trials(trial_setup(), limit=6)
    assert [trials.sizes({"micro_batch_shift": shift})[0] for shift in range(4)] == [6, 3, 1, 1]
    assert trials.refusal({"micro_batch_shift": 1}) is None
