"""Runs whose checkpoints cannot be written: they stop, or continue if asked to."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch.core.errors import CheckpointError
from autobatch.core.progress import Progress
from autobatch.training.checkpoints.checkpoint import is_valid, list_checkpoints
from autobatch.training.run import train
from tests.support.runs import HINT, STEPS, ActingAfter, open_loop, resume, rows, settings
from tests.support.training import fingerprint, make_workload


class Large(nn.Module):
    """Model whose state exceeds the file limit below, unlike a line of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3).double()
        self.register_buffer("table", torch.zeros(50_000))

    def forward(self, inputs):
        return self.body(inputs)


class FullDisk(Progress):
    """Progress that makes the system refuse files over 100 kB after some of the steps."""

    def __init__(self, steps: range) -> None:
        self.steps = steps
        self.notes: list[str] = []
        self.unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def stepped(self, step, of) -> None:
        soft = 100_000 if step.step in self.steps else self.unlimited[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self.unlimited[1]))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.unlimited)


def large_run(out: Path, disk: FullDisk, **changes):
    fields = {"checkpoint_every": 1, "on_failed_save": "continue", "keep_last": STEPS, **changes}
    with disk:
        return train(open_loop(make_workload(model=Large)), settings(out, **fields), disk, None)


def test_a_run_may_continue_on_a_full_disk(tmp_path: Path) -> None:
    disk = FullDisk(range(2, 4))
    done = large_run(tmp_path, disk)
    assert done.failed_checkpoints == [2, 3]
    assert len(disk.notes) == 2
    assert "the checkpoint of step 2 could not be written" in disk.notes[0]
    assert "File too large" in disk.notes[0]
    assert disk.notes[0].endswith(". The run continues without it (--on-failed-save continue)")
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == [f"step-0000000{step}" for step in (1, 4, 5, 6)]
    assert all(is_valid(path) for path in list_checkpoints(tmp_path / "checkpoints"))
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))


def test_by_default_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        large_run(tmp_path, FullDisk(range(2, 4)), on_failed_save="stop")
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000001"]


def test_the_final_checkpoint_must_be_written(tmp_path: Path) -> None:
    """The run can be resumed from the last checkpoint before it."""
    with pytest.raises(CheckpointError, match=f"step {STEPS} could not be written"):
        large_run(tmp_path, FullDisk(range(3, STEPS + 1)))
    loop, _ = resume(tmp_path, make_workload(model=Large))
    straight = open_loop(make_workload(model=Large))
    list(straight.run())
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)


def test_the_checkpoint_on_a_signal_must_be_written(tmp_path: Path) -> None:
    class Struck(FullDisk):
        def stepped(self, step, of) -> None:
            super().stepped(step, of)
            if step.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(CheckpointError, match="step 3 could not be written"):
        large_run(tmp_path, Struck(range(3, STEPS + 1)))


def test_a_failed_checkpoint_is_tried_again_when_the_next_is_due_by_the_clock(
    tmp_path: Path, monkeypatch
) -> None:
    loop = open_loop()
    loop.clock = lambda: 61.0 * loop.batches_seen
    real = os.fsync

    def refuse() -> None:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))

    class Recovering(ActingAfter):
        def note(self, text: str) -> None:
            monkeypatch.setattr(os, "fsync", real)

    fields = {"checkpoint_minutes": 2.0, "on_failed_save": "continue", "keep_last": STEPS}
    done = train(loop, settings(tmp_path, **fields), Recovering(2, refuse), None)
    assert done.failed_checkpoints == [2]
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert steps == [4, 6]


def test_a_failing_disk_ends_the_run_with_the_earlier_checkpoint(tmp_path: Path, monkeypatch) -> None:
    calls = iter(range(100))

    def fsync(descriptor: int) -> None:
        if next(calls) > 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        train(open_loop(), settings(tmp_path, checkpoint_every=1), Progress(), None)
    assert HINT in caught.value.__notes__[0]
    monkeypatch.undo()
    loop, _ = resume(tmp_path)
    straight = open_loop()
    list(straight.run())
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)
