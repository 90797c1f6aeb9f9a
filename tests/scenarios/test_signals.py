"""Runs that a signal stops: a checkpoint is written, and the resumed run ends with the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autobatch import Interrupted
from autobatch.core.signals import ENDING
from tests.support.kinds import stateful
from tests.support.runs import HINT, STEPS, open_loop, resume, rows, saved_steps, settings, train
from tests.support.training import fingerprint, mean_loss


@pytest.mark.parametrize(
    ("number", "exit_code", "at", "step"),
    [
        (signal.SIGINT, 130, 1, 0),
        (signal.SIGTERM, 143, 5, 1),
        (ENDING[-1], 143, 6, 2),
        (signal.SIGTERM, 143, 3 * STEPS, STEPS),
    ],
)
def test_a_signal_drops_the_open_step_and_a_resume_draws_it_again(
    number: int, exit_code: int, at: int, step: int, tmp_path: Path
) -> None:
    """A step has three micro-batches. The one in which the signal comes ends."""
    passes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        passes.append(1)
        if len(passes) == at:
            os.kill(os.getpid(), number)
        return mean_loss(model, batch)

    options = {"target_batch": 8, "micro_batch": 3}
    straight, out = open_loop(stateful(), **options), tmp_path / "stopped"
    train(straight, settings(tmp_path / "straight"))
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        train(open_loop(stateful(loss=loss), **options), settings(out))
    assert caught.value.exit_code == exit_code
    assert f"after step {step} of {STEPS}" in str(caught.value)
    assert f"checkpoint {out / 'checkpoints' / f'step-{step:08d}'}" in str(caught.value)
    assert str(caught.value).endswith(f"Resume with: {HINT}")
    assert signal.getsignal(number) is before
    assert saved_steps(out) == [step]
    loop, done = resume(out, stateful(), **options)
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)
    assert (done.optimizer_steps, done.resumed_from) == (STEPS, str(out / f"checkpoints/step-{step:08d}"))
    timed = {"seconds": 0, "samples_per_s": 0, "items_per_s": 0}
    assert [row | timed for row in rows(out)] == [row | timed for row in rows(tmp_path / "straight")]
