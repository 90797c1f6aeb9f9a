"""What a run does beside its steps: validation at intervals and checkpoints by the clock."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import torch
from torch import nn

from autobatch.progress import Silent
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.run import train
from tests.training.helpers import fingerprint, make_workload, points
from tests.training.test_run import STEPS, open_loop, rows, settings


def noisy_workload():
    """A model that draws random numbers, and data to validate on."""
    return make_workload(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(),
        validation_data=points(10, seed=1),
    )


def test_validation_at_intervals_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    plain, watched = open_loop(noisy_workload()), open_loop(noisy_workload())
    torch.manual_seed(0)
    train(plain, settings(tmp_path / "plain"), Silent(), None)
    torch.manual_seed(0)
    done = train(watched, settings(tmp_path / "watched", validate_every=2), Silent(), None)
    assert fingerprint(watched.trainee.model) == fingerprint(plain.trainee.model)
    found = {row["step"]: row["validation"] for row in rows(tmp_path / "watched")}
    assert [step for step, figures in found.items() if figures] == [2, 4], "the end has its own"
    assert found[2]["loss"] != found[4]["loss"]
    assert done.validation["loss"] > 0
    assert not any(row["validation"] for row in rows(tmp_path / "plain"))


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    loop = open_loop()
    ticks = count(step=10.0)
    loop.clock = lambda: next(ticks)
    train(loop, settings(tmp_path, checkpoint_minutes=1.0, keep_last=STEPS), Silent(), None)
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert steps[-1] == STEPS
    assert 1 < len(steps) < STEPS, "some steps are under a minute after the last checkpoint"
