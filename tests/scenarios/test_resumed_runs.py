"""Runs that end with an error and are resumed from their newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import (
    DoesNotFitError,
    NonFiniteError,
    Progress,
    RestartSmallerError,
)
from autobatch.training.checkpoint import load_newest
from autobatch.training.resume import restore_loop
from autobatch.training.run import train
from tests.support.faults import plain
from tests.support.runs import (
    HINT,
    open_loop,
    saved_steps,
    settings,
)
from tests.support.training import make_workload, mean_loss


def test_a_non_finite_loss_leaves_the_checkpoint_and_tells_how_to_resume(tmp_path: Path) -> None:
    calls = []

    def loss(model, batch):
        calls.append(1)
        return mean_loss(model, batch) * (float("nan") if len(calls) > 12 else 1.0)

    loop = open_loop(make_workload(loss=loss))
    with pytest.raises(NonFiniteError) as caught:
        train(loop, settings(tmp_path, checkpoint_every=2), Progress())
    assert HINT in caught.value.__notes__[0]
    found = load_newest(tmp_path / "checkpoints")
    assert found.state["counters"]["batches_seen"] == 4
    assert all(torch.isfinite(value).all() for value in found.state["model"].values())


def test_a_run_that_is_always_out_of_memory_in_the_optimizer_ends_at_a_micro_batch_of_1(
    tmp_path: Path,
) -> None:
    codes = []
    for number in range(3):
        loop = open_loop(plain(), target_batch=8, micro_batch=4, ema=0.9)
        resumed = load_newest(tmp_path / "checkpoints") if number else None
        if resumed is not None:
            restore_loop(loop, resumed.state, same_hardware=True)

        def raise_oom(*_: object, loop: Any = loop, fails: int = number) -> None:
            if fails or loop.batches_seen == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

        loop.train_state.optimizers[0].register_step_pre_hook(raise_oom)
        with pytest.raises((DoesNotFitError, RestartSmallerError), match="inside the optimizer") as caught:
            train(loop, settings(tmp_path, checkpoint_every=2, resumed=resumed), Progress())
        codes.append(caught.value.exit_code)
        assert HINT in caught.value.__notes__[0]
        assert saved_steps(tmp_path) == [2], "part of the weights of step 3 may have moved"
        assert number == 2 or json.loads((tmp_path / "oom.json").read_text())["micro_batch"] == 2 - number
    assert codes == [77, 77, 3]
    assert "a fused optimizer" in str(caught.value)
