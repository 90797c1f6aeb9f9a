"""State of a run that users have reported: what a resume must restore, and what may be said of it."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autobatch
from tests.support.kinds import Thawed
from tests.support.runs import ActingAfter, fit, fit_until
from tests.support.training import apart, make_workload, mean_loss, reference, sgd, then, weights

OPTIONS: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 3, "seed": 3}
ORDER = [(7 * place) % 24 for place in range(24)]
"""The samples of an epoch, as a sampler draws them."""
BATCHES = [(ORDER * 2)[8 * step : 8 * step + 8] for step in range(6)]
SAVED, STOPPED, STEPS = 5, 7, 9


class Centred(nn.Module):
    """Layer whose forward hook keeps a running mean in a buffer that it registers in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 8)
        self.linear.register_forward_hook(self.keep)

    @staticmethod
    def keep(module: Any, _: object, output: Tensor) -> Tensor:
        if not hasattr(module, "mean"):
            module.register_buffer("mean", torch.zeros(8, dtype=output.dtype))
        if module.training:
            module.mean = 0.99 * module.mean + 0.01 * output.detach().mean(0)
        return output - module.mean.clone()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def hooked() -> Any:
    return make_workload(model=lambda: nn.Sequential(Centred(), nn.Tanh(), nn.Linear(8, 3)).double())


def test_a_run_that_unfreezes_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """The micro-batch is the whole batch, for the sake of its batch statistics."""
    plain = make_workload(model=lambda: Thawed().double())
    workload = replace(plain, optimizer=then(sgd, Thawed.after_step), sampler=ORDER)
    found, _ = fit(workload, tmp_path, steps=6, **{**OPTIONS, "max_micro_batch": 8})
    expected, _ = reference(plain, BATCHES, mean_loss, seed=3, after_step=Thawed.after_step)
    assert apart(weights(found.model), expected) < 1e-12


def test_a_resume_restores_a_buffer_that_a_hook_has_made(tmp_path: Path) -> None:
    options = {**OPTIONS, "steps": STEPS, "split_check": "note"}
    whole, _ = fit(hooked(), tmp_path / "whole", **options)
    fit_until(STOPPED, hooked(), tmp_path / "parts", checkpoint_every=SAVED, **options)
    parts, _ = fit(hooked(), tmp_path / "parts", resume=True, **options)
    assert torch.equal(weights(parts.model), weights(whole.model))


def test_a_checkpoint_never_has_more_steps_than_the_disk_has_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look at each flush of the folder that publishes a checkpoint at what a power cut would leave."""
    flushed, published = [0], []

    def fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.name == "metrics.jsonl":
            flushed[0] = len(path.read_text().splitlines())
        if path.name == "checkpoints":
            steps = [int(name.removeprefix("step-")) for name in os.listdir(path) if "." not in name]
            published.append((max(steps), flushed[0]))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fdatasync", fsync)
    fit(make_workload(), tmp_path, steps=6, checkpoint_every=2, **OPTIONS)
    assert [step for step, _ in published] == [2, 4, 6]
    assert all(lines >= step for step, lines in published), published


def test_a_second_run_deletes_nothing_of_the_first_where_the_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, refuse)
    unfinished = tmp_path / "run" / ".result.json.12345678.tmp"
    left = []

    def start_another() -> None:
        unfinished.touch()
        with suppress(autobatch.InputError):
            fit(make_workload(), tmp_path / "run", steps=1, **OPTIONS)
        left.append(unfinished.exists())

    with suppress(autobatch.AutobatchError):  # the second run may have moved its files away
        fit(make_workload(), tmp_path / "run", steps=2, listener=ActingAfter(1, start_another), **OPTIONS)
    assert left == [True]
