"""A run on the disk: what it writes, the signals it obeys, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autobatch.core.errors import CheckpointError, Interrupted, NonFiniteError, RestartSmallerError
from autobatch.core.progress import Progress
from autobatch.training.checkpoint import list_checkpoints, load_newest
from autobatch.training.loop_state import restore_loop
from autobatch.training.run import RunSettings, train
from tests.support.faults import Fault, Watching, plain
from tests.support.training import fingerprint, make_loop, make_workload, mean_loss, network, points

STEPS = 6
HINT = "autobatch fit --resume"


class Telling(Progress):
    """Calls back after a step."""

    def __init__(self, at: int, action) -> None:
        self.at, self.action = at, action

    def stepped(self, step, of) -> None:
        assert of == STEPS
        if step.step == self.at:
            self.action()


def settings(out: Path, **changes) -> RunSettings:
    fields = {"out": out, "checkpoint_every": None, "keep_last": 3, "facts": {"seed": 0}, "resume_hint": HINT}
    return RunSettings(**{**fields, **changes})


def open_loop(workload=None, **options):
    options = {"target_batch": 7, "micro_batch": 3, "steps": STEPS, **options}
    return make_loop(workload or make_workload(), **options)


def go_on(out: Path, workload=None, **options):
    loop = open_loop(workload, **options)
    resumed = load_newest(out / "checkpoints")
    restore_loop(loop, resumed.state, same_hardware=True)
    return loop, train(loop, settings(out), Progress(), resumed)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_metrics_its_checkpoint_and_its_weights(tmp_path: Path) -> None:
    loop = open_loop()
    done = train(loop, settings(tmp_path, checkpoint_every=2, keep_last=2), Progress(), None)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert done.checkpoint == str(tmp_path / "checkpoints" / "step-00000006")
    assert (done.optimizer_steps, done.samples, done.resumed_from) == (STEPS, 42, None)
    assert (done.first_loss, done.final_loss) == (rows(tmp_path)[0]["loss"], rows(tmp_path)[-1]["loss"])
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[k], v) for k, v in loop.train_state.model.state_dict().items())


def untimed(row: dict) -> dict:
    return {**row, "seconds": 0, "samples_per_s": 0, "items_per_s": 0}


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)]
)
@pytest.mark.parametrize("at", [1, STEPS])
def test_a_signal_stops_at_the_end_of_the_window_with_a_checkpoint(tmp_path, number, exit_code, at) -> None:
    straight = open_loop()
    train(straight, settings(tmp_path / "straight"), Progress(), None)
    out = tmp_path / "stopped"
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        train(open_loop(), settings(out), Telling(at, lambda: os.kill(os.getpid(), number)), None)
    assert caught.value.exit_code == exit_code
    assert f"after step {at} of {STEPS}" in str(caught.value)
    assert f"checkpoint {out / 'checkpoints' / f'step-{at:08d}'}" in str(caught.value)
    assert str(caught.value).endswith(f"Resume with: {HINT}")
    assert signal.getsignal(number) is before
    loop, done = go_on(out)
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)
    assert done.resumed_from == str(out / "checkpoints" / f"step-{at:08d}")
    assert list(map(untimed, rows(out))) == list(map(untimed, rows(tmp_path / "straight")))


def test_a_signal_is_obeyed_during_validation(tmp_path: Path) -> None:
    seen = []

    def metrics(model, batch):
        seen.append(len(batch[0]))
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    loop = open_loop(make_workload(validation_data=points(30), metrics=metrics))
    with pytest.raises(Interrupted) as caught:
        train(loop, settings(tmp_path), Progress(), None)
    assert caught.value.exit_code == 143
    assert seen == [3, 3]
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000006"]
    again, done = go_on(tmp_path, make_workload(validation_data=points(30)))
    assert again.batches_seen == STEPS
    assert done.validation["loss"] > 0
    assert done.optimizer_steps == STEPS
    assert len(rows(tmp_path)) == STEPS


def test_a_signal_during_a_validation_in_between_does_not_change_the_rest(tmp_path: Path) -> None:
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
    train(straight, settings(tmp_path / "straight", validate_every=2), Progress(), None)
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted, match="after step 2 of 6"):
        train(open_loop(workload(strike_at=4)), settings(out, validate_every=2), Progress(), None)
    assert [row["step"] for row in rows(out)] == [1, 2]
    loop, _ = go_on(out, workload())
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)


def test_off_the_main_thread_no_signal_is_touched(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    done = []
    thread = threading.Thread(
        target=lambda: done.append(train(open_loop(), settings(tmp_path), Progress(), None))
    )
    thread.start()
    thread.join()
    assert done[0].optimizer_steps == STEPS
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_of_windows_that_are_trained_again_are_dropped(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("killed")

    with pytest.raises(KeyError):
        train(open_loop(), settings(tmp_path, checkpoint_every=2), Telling(5, fail), None)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert load_newest(tmp_path / "checkpoints").state["counters"]["batches_seen"] == 4
    _, done = go_on(tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))
    assert done.first_loss == rows(tmp_path)[0]["loss"]
    assert done.samples == 42


def test_a_loss_that_is_not_finite_leaves_the_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    calls = []

    def loss(model, batch):
        calls.append(1)
        return mean_loss(model, batch) * (float("nan") if len(calls) > 12 else 1.0)

    loop = open_loop(make_workload(loss=loss))
    with pytest.raises(NonFiniteError) as caught:
        train(loop, settings(tmp_path, checkpoint_every=2), Progress(), None)
    assert HINT in caught.value.__notes__[0]
    found = load_newest(tmp_path / "checkpoints")
    assert found.state["counters"]["batches_seen"] == 4
    assert all(torch.isfinite(value).all() for value in found.state["model"].values())


def test_a_disk_that_fails_ends_the_run_with_the_earlier_checkpoint(tmp_path: Path, monkeypatch) -> None:
    calls = iter(range(100))

    def fsync(descriptor: int) -> None:
        if next(calls) > 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        train(open_loop(), settings(tmp_path, checkpoint_every=1), Progress(), None)
    assert HINT in caught.value.__notes__[0]
    monkeypatch.undo()
    loop, _ = go_on(tmp_path)
    straight = open_loop()
    list(straight.run())
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)


def test_out_of_memory_in_the_optimizer_goes_on_smaller(tmp_path: Path) -> None:
    fault = Fault()
    loop = open_loop(plain(), target_batch=8, micro_batch=4, meter=Watching(fault))

    def strike(*_: object) -> None:
        if fault.armed:
            fault.at.add(fault.count + 5)

    loop.train_state.optimizers[0].register_step_pre_hook(strike)

    def arm() -> None:
        fault.armed = True

    with fault, pytest.raises(RestartSmallerError, match="inside the optimizer step") as caught:
        train(loop, settings(tmp_path, checkpoint_every=2), Telling(3, arm), None)
    assert caught.value.exit_code == 77
    assert HINT in caught.value.__notes__[0]
    assert json.loads((tmp_path / "oom.json").read_text())["micro_batch"] == 2
    again, done = go_on(tmp_path, plain(), target_batch=8, micro_batch=4)
    assert [row["micro_batch"] for row in rows(tmp_path)] == [4, 4, 2, 2, 2, 2]
    assert done.micro_batch == again.micro_batch == 2
    assert not (tmp_path / "oom.json").exists()


def test_out_of_memory_before_the_first_checkpoint_says_what_to_start_with(tmp_path: Path) -> None:
    fault = Fault()
    loop = open_loop(plain(), target_batch=8, micro_batch=4, meter=Watching(fault))
    loop.train_state.optimizers[0].register_step_pre_hook(lambda *_: fault.at.add(fault.count + 5))
    fault.armed = True
    with fault, pytest.raises(RestartSmallerError) as caught:
        train(loop, settings(tmp_path), Progress(), None)
    assert "start again with --max-micro-batch 2" in caught.value.__notes__[0]


def test_a_new_run_does_not_take_over_what_an_old_one_shrank_to(tmp_path: Path) -> None:
    (tmp_path / "oom.json").write_text('{"micro_batch": 1}')
    assert train(open_loop(), settings(tmp_path), Progress(), None).micro_batch == 3
