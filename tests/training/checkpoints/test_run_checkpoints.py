"""The times at which a run writes checkpoints, and state that none can hold."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from autobatch.core.errors import InputError
from autobatch.core.progress import Progress
from autobatch.training.run import train
from tests.support.runs import STEPS, open_loop, saved_steps, settings
from tests.support.training import make_workload


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {**super().state_dict(), "odd": object()}

    loop = open_loop(make_workload(schedule=lambda optimizer, steps: Odd(optimizer, 1)))
    with pytest.raises(InputError, match="schedules cannot be kept in a checkpoint"):
        train(loop, settings(tmp_path), Progress(), None)
    assert loop.batches_seen == 0


def test_checkpoints_are_written_by_the_clock(tmp_path: Path) -> None:
    loop = open_loop()
    ticks = count(step=10.0)
    loop.clock = lambda: next(ticks)
    train(loop, settings(tmp_path, checkpoint_minutes=1.0, keep_last=STEPS), Progress(), None)
    steps = saved_steps(tmp_path)
    assert steps[-1] == STEPS
    assert 1 < len(steps) < STEPS, "some steps are under a minute after the last checkpoint"
