"""Rules of the user's own that end a run, and stops within a batch: nothing is lost, no bit differs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import Interrupted, StepRecord
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.runs import ActingAfter, fit, saved_steps, settings, train
from tests.support.training import make_workload, mean_loss, points, weights

OPTIONS: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 3, "steps": 9, "split_check": "off"}


def test_a_rule_of_the_users_ends_a_run_as_its_last_step_does_and_a_resume_goes_on(tmp_path: Path) -> None:
    seen: list[int] = []

    def until(record: StepRecord) -> bool:
        seen.append(record.step)
        return record.step == 4

    workload = make_workload(validation_data=points(9, seed=5))
    whole, _ = fit(workload, tmp_path / "whole", **OPTIONS)
    short, notes = fit(workload, tmp_path / "run", until=until, **OPTIONS)
    assert seen == [1, 2, 3, 4]
    assert (short.training.optimizer_steps, short.training.samples) == (4, 32)
    assert short.training.checkpoint.endswith("step-00000004")
    assert short.training.validation["loss"] > 0
    assert (tmp_path / "run" / "report.html").exists()
    assert any("after step 4 of 9" in note for note in notes)
    rest, _ = fit(workload, tmp_path / "run", resume=True, **OPTIONS)
    assert torch.equal(weights(rest.model), weights(whole.model))


def ruled(out: Path) -> tuple[int, str]:
    """Train on ranks until the rule of rank 0 says so, then until it raises; return both ends."""
    group = open_group()

    def until(record: StepRecord) -> bool:
        assert group.rank == 0
        if record.step == 3:
            raise ZeroDivisionError
        return record.step == 2

    loop = ranked_loop(group, make_workload(), [3, 3], target_batch=8, steps=6)
    steps = train(loop, settings(out, until=until)).optimizer_steps
    try:
        train(loop, settings(out, until=until))
    except Exception as error:
        group.fail(str(error), 2)
        notes = getattr(error, "__notes__", [])
        return steps, f"{type(error).__name__} {loop.batches_seen} {notes}"
    raise AssertionError("the rule has raised nothing")


@pytest.mark.distributed
def test_rank_0_decides_for_all(server: RankServer, tmp_path: Path) -> None:
    own, other = server.values(ruled, tmp_path)
    assert own == (2, "ZeroDivisionError 3 ['raised by the workload: until']")
    assert (other[0], other[1][:10]) == (2, "RankLost 3")
    assert saved_steps(tmp_path) == [2, 3]


def test_a_stream_ends_its_open_step_because_it_cannot_go_back(tmp_path: Path) -> None:
    """It cannot be read again from within a batch."""
    asked: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if asked:
            asked.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        return mean_loss(model, batch)

    workload = make_workload(train_data=lambda: iter(list(points())), loss=loss)
    listener = ActingAfter(2, lambda: asked.append(True))
    with pytest.raises(Interrupted, match="after step 3 of 9"):
        fit(workload, tmp_path, listener=listener, **OPTIONS)
    assert saved_steps(tmp_path)[-1] == 3
