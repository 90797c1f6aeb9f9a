"""Runs that a signal stops: a checkpoint is written, and the resumed run ends with the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autobatch import Interrupted, Progress
from autobatch.training.run import train
from tests.support.kinds import stateful
from tests.support.runs import HINT, STEPS, open_loop, resume, rows, saved_steps, settings
from tests.support.training import fingerprint, make_workload, mean_loss, network, points


@pytest.mark.parametrize(
    ("number", "exit_code", "at", "step"),
    [
        (signal.SIGINT, 130, 1, 0),
        (signal.SIGTERM, 143, 5, 1),
        (signal.SIGUSR1, 143, 6, 2),
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
    train(straight, settings(tmp_path / "straight"), Progress())
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        train(open_loop(stateful(loss=loss), **options), settings(out), Progress())
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


def test_a_signal_in_a_periodic_validation_does_not_change_the_rest_of_the_run(tmp_path: Path) -> None:
    """The checkpoint holds the random states of the training, not those in the middle of a validation."""

    def workload(strike_at: int | None = None):
        seen = []

        def metrics(model, batch):
            torch.rand(7)
            seen.append(1)
            if len(seen) == strike_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return {}

        return make_workload(
            model=lambda: nn.Sequential(nn.Dropout(0.5), network()).double(),
            validation_data=points(30),
            metrics=metrics,
        )

    straight = open_loop(workload())
    train(straight, settings(tmp_path / "straight", validate_every=2), Progress())
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted, match="after step 2 of 6"):
        train(open_loop(workload(strike_at=4)), settings(out, validate_every=2), Progress())
    assert [row["step"] for row in rows(out)] == [1, 2]
    loop, _ = resume(out, workload())
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)
