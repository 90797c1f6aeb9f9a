"""Checkpoints are loaded as they were saved, pruned from the oldest, never executed, and damage is named."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import CheckpointError, InputError
from autobatch.training.checkpoint import (
    clean_leftovers,
    is_valid,
    list_checkpoints,
    load_newest,
    read_manifest,
    write_manifest,
)
from tests.support.checkpoints import MANIFEST, STATE, TENSORS, newest, save

FILES = [MANIFEST, STATE, TENSORS]


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert (loaded.path, loaded.facts, loaded.passed_over) == (path, {"seed": 1, "step": 2}, [])
    assert torch.equal(loaded.state["weights"], torch.full((8,), 2.0))
    assert load_newest(tmp_path / "nothing") is None
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["facts"]) == (2, {"seed": 1, "step": 2})
    assert manifest["files"] == {name: entry_of(path / name) for name in (STATE, TENSORS)}


def entry_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_any_byte_is_detected(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = (path / name).read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (path / name).write_bytes(changed)
        assert not is_valid(path)
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert loaded.state["step"] == 1
    assert len(loaded.passed_over) == 1
    assert name in loaded.passed_over[0]
    assert (path / name).read_bytes() == bytes(changed), "a damaged checkpoint is never deleted"
    (path / name).write_bytes(content)
    assert newest(tmp_path) == 2


def seal(path: Path, files: dict[str, Any]) -> None:
    write_manifest(path / MANIFEST, {"step": 2, "files": files, "facts": {"seed": 1, "step": 2}})


def test_a_manifest_that_lists_something_else_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    sound = read_manifest(path)["files"]
    for files, message in (
        ({**sound, "../../secret": sound[STATE]}, "lists files outside of the checkpoint"),
        ({STATE: {"bytes": 3}}, "cannot be read"),
        ([STATE], "cannot be read"),
    ):
        seal(path, files)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=message):
            read_manifest(path)
    seal(path, sound)
    assert is_valid(path)
    shutil.copy(path / TENSORS, path / "planted.safetensors")
    with pytest.raises(InputError, match=r"planted\.safetensors is not listed in manifest\.json"):
        load_newest(tmp_path)
    content = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(content.replace('"schema": 5', '"schema": 4'))
    with pytest.raises(InputError, match="has format 4, and this version reads 5"):
        load_newest(tmp_path)


def test_the_checkpoint_of_the_resume_is_not_deleted(tmp_path: Path) -> None:
    resumed_from = save(tmp_path, 1)
    for step in range(2, 7):
        save(tmp_path, step, keep_last=2, protected=resumed_from)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "5", "6"]


def test_damaged_checkpoints_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / STATE).write_bytes(b"")
    save(tmp_path, 9)
    shutil.move(tmp_path / "step-00000009", tmp_path / "step-00000099")
    (tmp_path / "step-00000099" / MANIFEST).unlink()
    for step in (4, 5, 6):
        save(tmp_path, step, keep_last=2)
    names = [int(path.name[-2:]) for path in list_checkpoints(tmp_path)]
    assert names == [2, 5, 6, 99]


def test_a_damaged_checkpoint_is_set_aside_when_the_run_reaches_its_step_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / STATE).write_bytes(b"damaged")
    save(tmp_path, 2)
    assert newest(tmp_path) == 2
    assert (tmp_path / "step-00000002.damaged-1" / STATE).read_bytes() == b"damaged"
    clean_leftovers(tmp_path)
    assert (tmp_path / "step-00000002.damaged-1").is_dir()


def test_leftovers_are_deleted_and_a_checkpoint_that_was_set_aside_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    path.rename(tmp_path / "step-00000002.trash-123")
    (tmp_path / "step-00000003.tmp-123").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    clean_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000001", "step-00000002"]
    assert newest(tmp_path) == 2
