"""The loop that a fit trains, as its options and its plan ask for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from autobatch import InputError
from autobatch.core.units import MiB
from autobatch.device.select import open_device
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.training.run import TrainingRun, train_plan
from autobatch.workload.order import GlobalBatchSampler
from tests.support.options import as_options
from tests.support.training import Rows, make_loop, make_setup, make_workload


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (lambda step: 1 / (1 + step), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 7]),
        (
            lambda optimizer, steps: StepLR(optimizer, steps - 2, 0.5),
            [1] * 5 + [0.5] * 2,
        ),
    ],
)
def test_a_schedule_takes_what_its_arguments_are_called(schedule, rates) -> None:
    loop = make_loop(make_workload(schedule=schedule), target_batch=16, steps=7)
    assert [record.learning_rate for record in loop.run()] == pytest.approx([0.1 * one for one in rates])


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda optimizer, steps: ReduceLROnPlateau(optimizer), "step number alone"),
        (lambda _, steps_per_epoch: StepLR(_, 30 * steps_per_epoch), "no steps_per_epoch: compute"),
    ],
)
def test_a_schedule_that_depends_on_the_loss_or_on_epochs_is_refused(schedule: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_loop(make_workload(schedule=schedule))


def test_the_first_step_starts_with_an_empty_cache_as_a_probe_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation before training leaves segments of its own, which training would be packed into."""
    data = torch.zeros(64, 64 * 1024)
    workload = make_workload(
        model=lambda: nn.Linear(64 * 1024, 4),
        train_data=Rows(data),
        validation_data=Rows(data),
        loss=lambda model, batch: model(batch[0]).exp().mean(),
    )
    setup = replace(make_setup(workload), device=open_device("sim:t4", "1GiB"))
    plan = make_plan(target_batch=7, micro_batch_limit=3, learning_rate=workload.learning_rate)
    asked = as_options("fit", target_batch=7, steps=1)
    sampler = GlobalBatchSampler(samples=64, target_batch=7, seed=0, steps=1)
    monkeypatch.setattr(TrainingRun, "train", lambda _, loop: loop.train_state.meter.stats())
    stats = train_plan(setup, plan, sampler, TrainingRun(out=tmp_path, options=asked), Ranks())
    assert stats.peak_allocated_bytes > stats.allocated_bytes
    assert stats.reserved_bytes == 2 * MiB  # the segment of small blocks, which holds the model
