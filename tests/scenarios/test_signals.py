"""Runs that a signal stops: a checkpoint is written, and the resumed run ends with the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch import Interrupted, Progress
from autobatch.training.run import train
from tests.support.runs import HINT, STEPS, ActingAfter, open_loop, resume, rows, settings
from tests.support.training import fingerprint, make_workload, network, points


def untimed(row: dict) -> dict:
    return {**row, "seconds": 0, "samples_per_s": 0, "items_per_s": 0}


@pytest.mark.parametrize(
    ("number", "exit_code", "at"),
    [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, STEPS), (signal.SIGUSR1, 143, 2)],
)
def test_a_signal_stops_the_run_after_the_step_with_a_checkpoint(tmp_path, number, exit_code, at) -> None:
    straight = open_loop()
    train(straight, settings(tmp_path / "straight"), Progress())
    out = tmp_path / "stopped"
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        train(open_loop(), settings(out), ActingAfter(at, lambda: os.kill(os.getpid(), number)))
    assert caught.value.exit_code == exit_code
    assert f"after step {at} of {STEPS}" in str(caught.value)
    assert f"checkpoint {out / 'checkpoints' / f'step-{at:08d}'}" in str(caught.value)
    assert str(caught.value).endswith(f"Resume with: {HINT}")
    assert signal.getsignal(number) is before
    loop, done = resume(out)
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)
    assert done.resumed_from == str(out / "checkpoints" / f"step-{at:08d}")
    assert list(map(untimed, rows(out))) == list(map(untimed, rows(tmp_path / "straight")))


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
