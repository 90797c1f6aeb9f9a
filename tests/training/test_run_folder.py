"""The folder of a run: its name, its lock, and the files in it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from autobatch.core.errors import CheckpointError, InputError
from autobatch.training.run_folder import claim_folder, export_weights, folder_of, move_earlier_run
from tests.support.training import make_loop, make_workload


def hold(out: Path, talk: Connection) -> None:
    with claim_folder(out):
        talk.send("held")
        talk.recv()


def test_a_folder_is_held_until_its_process_ends_even_by_a_kill(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=hold, args=(tmp_path, there))
    other.start()
    try:
        assert here.recv() == "held"
        with pytest.raises(InputError, match="another run is writing to"), claim_folder(tmp_path):
            pass
    finally:
        other.kill()
        other.join()
    with claim_folder(tmp_path):
        assert not list(tmp_path.iterdir())


def wait_for_end(talk: Connection) -> None:
    talk.send("started")
    talk.recv()


def test_a_forked_child_does_not_hold_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=wait_for_end, args=(there,))
    try:
        with claim_folder(tmp_path):
            child.start()
            assert here.recv() == "started"
            with pytest.raises(InputError, match="another run"), claim_folder(tmp_path):
                pass
        assert child.is_alive()
        with claim_folder(tmp_path):
            pass
    finally:
        here.send(None)
        child.join()
    assert child.exitcode == 0


def test_a_child_forked_in_the_block_closes_no_other_file_at_its_end(tmp_path: Path) -> None:
    pid = None
    with contextlib.suppress(_End), claim_folder(tmp_path):
        pid = os.fork()
        if pid == 0:
            other = os.open(os.devnull, os.O_RDONLY)  # takes the number of the closed lock
            raise _End
    if pid == 0:
        try:
            os.fstat(other)
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class _End(Exception):
    """Leaves a block."""


def test_new_folders_are_removed_if_nothing_was_written(tmp_path: Path) -> None:
    with claim_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    with claim_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "run.log").touch()
    assert (tmp_path / "a" / "b" / "run.log").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(InputError, match=f"the run's folder {out} cannot be made "), claim_folder(out):
            pass


def test_the_last_run_that_has_checkpoints_is_the_one_to_resume(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--resume found no run"):
        folder_of(None, "mine", resume=True)
    for name in ("20260101-000000", "20260102-000000"):
        (tmp_path / "runs" / "mine" / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "20260103-000000").mkdir()
    assert folder_of(None, "mine", resume=True) == Path("runs/mine/20260102-000000")
    assert folder_of(None, "mine", resume=False).parent == Path("runs/mine")


def test_an_earlier_run_is_moved_out_of_the_way_and_other_files_stay(tmp_path: Path) -> None:
    assert move_earlier_run(tmp_path) is None
    (tmp_path / "notes.txt").touch()
    for number in (1, 2):
        (tmp_path / "checkpoints" / f"step-{number}").mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text(str(number))
        assert move_earlier_run(tmp_path) == tmp_path / f"previous-{number}"
    for number in (1, 2):
        moved = tmp_path / f"previous-{number}"
        assert (moved / "checkpoints" / f"step-{number}").is_dir()
        assert (moved / "metrics.jsonl").read_text() == str(number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "previous-1", "previous-2"]


class Tied(nn.Module):
    """Model whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(ids))


def test_exported_weights_load_into_the_model_and_tied_ones_are_stored_once(tmp_path: Path) -> None:
    train_state = make_loop(make_workload(model=Tied)).train_state
    export_weights(train_state, tmp_path)
    assert len(load_file(tmp_path / "model.safetensors")) == 1
    other = Tied()
    load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other.output.weight, train_state.model.output.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_exported_weights_honour_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        export_weights(make_loop(make_workload()).train_state, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


def test_weights_that_cannot_be_written_are_named_and_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"could not be written to .*model\.safetensors"):
        export_weights(make_loop(make_workload()).train_state, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
