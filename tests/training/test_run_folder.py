"""The folder of a run: its name, its lock, and the files in it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.training.run_folder import claim_folder, folder_of


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
        pass


def test_new_folders_are_removed_if_nothing_was_written(tmp_path: Path) -> None:
    with claim_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    with claim_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "run.log").touch()
    assert (tmp_path / "a" / "b" / "run.log").exists()


def test_the_last_run_that_has_checkpoints_is_the_one_to_resume(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--resume found no run"):
        folder_of(None, "mine", resume=True)
    for name in ("20260101-000000", "20260102-000000"):
        (tmp_path / "runs" / "mine" / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "20260103-000000").mkdir()
    assert folder_of(None, "mine", resume=True) == Path("runs/mine/20260102-000000")
    assert folder_of(None, "mine", resume=False).parent == Path("runs/mine")
