"""Short runs at one learning rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.core.check_options import options_from
from autobatch.core.errors import InputError
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.tuning.lr_trial import PARTS, LrTrialSpec, StepLoss, parts_of, short_run
from tests.support.short_runs import STEPS, find_rate, linear_setup, squares, task_of
from tests.support.trials import setup_of, signed, simulated_gpu
from tests.support.untouched import fingerprint, with_gradients


def test_a_non_finite_gradient_ends_the_run() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        return squares(model, batch) + 0 * (model.weights - model.weights.detach()).abs().sqrt().sum()  # type: ignore[operator, union-attr]

    seen = list(short_run(linear_setup(loss=spoiled), task_of(0.01), 0.01, 0))
    assert [one.failure for one in seen] == ["its loss or gradient is not finite"]
    skipping = task_of(0.01)._replace(skips=True)
    assert [one.failure for one in short_run(linear_setup(loss=spoiled), skipping, 0.01, 0)] == [None] * STEPS


def test_short_runs_leave_the_model_unchanged() -> None:
    made = linear_setup()
    with_gradients(made.model)
    before = fingerprint(made.model)
    assert find_rate(made, trials=8).best != 0.01
    assert fingerprint(made.model) == before
    ended = short_run(made, task_of(0.01), 0.01, 0)
    next(ended)
    ended.close()
    assert fingerprint(made.model) == before


def test_parts_are_means_over_counted_items() -> None:
    losses = [
        StepLoss(8.0, 1),
        StepLoss(2.0, 3),
        StepLoss(math.nan, 0),
        StepLoss(4.0, 2),
        StepLoss(1.0, 1),
        StepLoss(3.0, 1),
    ]
    found = list(parts_of(losses, 6))
    assert [part.loss for part in found] == [8.0, 2.0, 4.0, 2.0]
    assert {part.first for part in found} == {8.0}
    failed = list(parts_of([StepLoss(8.0, 1), StepLoss(math.nan, 0, "gone")], 4))
    assert [(part.loss, part.failure) for part in failed] == [(8.0, None), (None, "gone")]


@pytest.mark.parametrize("expandable", [False, True])
def test_short_runs_use_the_expandable_segments_of_the_plan(
    tmp_path: Path, allocators: list[CachingAllocator], expandable: bool
) -> None:
    made = setup_of(signed(set()), simulated_gpu(tmp_path, "1GiB"))
    knobs = {"expandable_segments": True} if expandable else {}
    task = LrTrialSpec(default=0.1, target_batch=8, micro_batch=4, precision="fp32", knobs=knobs, steps=4)
    assert [seen.failure for seen in short_run(made, task, 0.1, 0)] == [None] * 4
    assert {one.config.expandable_segments for one in allocators} == {expandable}


def test_a_short_run_has_at_least_one_step_per_part() -> None:
    with pytest.raises(InputError, match="lr_steps must be a whole number of 4 or more, found 3"):
        options_from("tune", {"target_batch": 32, "tune_lr": True, "lr_steps": 3})
    assert PARTS == 4
