"""What a run does beside its steps: validation, checkpoints, and the averaged weights."""

from __future__ import annotations

import os
import resource
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch.core.errors import CheckpointError
from autobatch.core.progress import Progress
from autobatch.training.checkpoint import is_valid, list_checkpoints
from autobatch.training.run import train
from tests.support.training import fingerprint, make_workload, mean_loss, points
from tests.training.test_run import STEPS, Telling, go_on, open_loop, rows, settings


def noisy_workload():
    """A model that draws random numbers, and data to validate on."""
    return make_workload(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(),
        validation_data=points(10, seed=1),
    )


def test_validation_at_intervals_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    plain, watched = open_loop(noisy_workload()), open_loop(noisy_workload())
    torch.manual_seed(0)
    train(plain, settings(tmp_path / "plain"), Progress(), None)
    torch.manual_seed(0)
    done = train(watched, settings(tmp_path / "watched", validate_every=2), Progress(), None)
    assert fingerprint(watched.train_state.model) == fingerprint(plain.train_state.model)
    found = {row["step"]: row["validation"] for row in rows(tmp_path / "watched")}
    assert [step for step, figures in found.items() if figures] == [2, 4], "the end has its own"
    assert found[2]["loss"] != found[4]["loss"]
    assert done.validation["loss"] > 0
    assert not any(row["validation"] for row in rows(tmp_path / "plain"))


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    loop = open_loop()
    ticks = count(step=10.0)
    loop.clock = lambda: next(ticks)
    train(loop, settings(tmp_path, checkpoint_minutes=1.0, keep_last=STEPS), Progress(), None)
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert steps[-1] == STEPS
    assert 1 < len(steps) < STEPS, "some steps are under a minute after the last checkpoint"


def test_validation_takes_the_micro_batch_that_was_asked_for(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model, batch):
        if not model.training:
            seen.append(len(batch[0]))
        return mean_loss(model, batch)

    workload = make_workload(loss=loss, validation_data=points(30))
    free = train(open_loop(workload), settings(tmp_path / "free"), Progress(), None)
    assert seen == [3] * 10, "the training's, where nothing tells how much memory there is"
    seen.clear()
    changed = settings(tmp_path / "fixed", validation_micro_batch=12)
    assert train(open_loop(workload), changed, Progress(), None).validation == pytest.approx(
        free.validation, rel=1e-12
    )
    assert seen == [12, 12, 6]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def test_the_averaged_weights_are_validated_and_exported_and_the_training_does_not_see_it(
    tmp_path: Path,
) -> None:
    data = points(30, seed=1)
    workload = make_workload(model=normalised, validation_data=data)
    plain = open_loop(workload)
    untouched = train(plain, settings(tmp_path / "plain"), Progress(), None)
    loop = open_loop(workload, ema=0.5)
    done = train(loop, settings(tmp_path / "run", validate_every=2), Progress(), None)
    assert fingerprint(loop.train_state.model) == fingerprint(plain.train_state.model)
    assert (done.ema, untouched.ema) == (0.5, None)

    stored = load_file(tmp_path / "run" / "model.safetensors")
    averaged = load_file(tmp_path / "run" / "model-ema.safetensors")
    names = [name for name, _ in loop.train_state.model.named_parameters()]
    for name, value in loop.train_state.model.state_dict().items():
        assert torch.equal(stored[name], value)
        assert torch.equal(averaged[name], value) == (name not in names), "buffers as they are"
    for name, average in zip(names, loop.train_state.average.tensors(), strict=True):
        assert torch.equal(averaged[name], average)
    assert not (tmp_path / "plain" / "model-ema.safetensors").exists()

    model = normalised().eval()
    model.load_state_dict(averaged)
    inputs, labels = data.columns
    assert done.validation["loss"] == pytest.approx(cross_entropy(model(inputs), labels).item(), rel=1e-12)
    assert done.validation["loss"] != untouched.validation["loss"]


class Large(nn.Module):
    """Its state is larger than the limit on files below; a line of metrics is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3).double()
        self.register_buffer("table", torch.zeros(50_000))

    def forward(self, inputs):
        return self.body(inputs)


class FullDisk(Progress):
    """Lets the system refuse files over 100 kB after some of the steps."""

    def __init__(self, steps: range) -> None:
        self.steps = steps
        self.notes: list[str] = []
        self.whole = resource.getrlimit(resource.RLIMIT_FSIZE)

    def stepped(self, step, of) -> None:
        soft = 100_000 if step.step in self.steps else self.whole[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self.whole[1]))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.whole)


def large_run(out: Path, disk: FullDisk, **changes):
    fields = {"checkpoint_every": 1, "on_failed_save": "continue", "keep_last": STEPS, **changes}
    with disk:
        return train(open_loop(make_workload(model=Large)), settings(out, **fields), disk, None)


def test_a_run_may_go_on_over_a_full_disk(tmp_path: Path) -> None:
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


def test_the_checkpoint_at_the_end_must_be_written(tmp_path: Path) -> None:
    """… and the run can be resumed from the last that was."""
    with pytest.raises(CheckpointError, match=f"step {STEPS} could not be written"):
        large_run(tmp_path, FullDisk(range(3, STEPS + 1)))
    loop, _ = go_on(tmp_path, make_workload(model=Large))
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


def test_by_the_clock_a_failed_checkpoint_is_tried_again_when_the_next_is_due(
    tmp_path: Path, monkeypatch
) -> None:
    loop = open_loop()
    loop.clock = lambda: 61.0 * loop.batches_seen
    real = os.fsync

    def refuse() -> None:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))

    class Recovering(Telling):
        def note(self, text: str) -> None:
            monkeypatch.setattr(os, "fsync", real)

    fields = {"checkpoint_minutes": 2.0, "on_failed_save": "continue", "keep_last": STEPS}
    done = train(loop, settings(tmp_path, **fields), Recovering(2, refuse), None)
    assert done.failed_checkpoints == [2]
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert steps == [4, 6]
