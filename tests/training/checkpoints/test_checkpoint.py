"""Checkpoints are loaded as they were saved, pruned from the oldest, and never executed."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from autobatch.core.errors import InputError
from autobatch.training.checkpoints.checkpoint import (
    clean_leftovers,
    is_valid,
    list_checkpoints,
)
from autobatch.training.checkpoints.load import load_newest
from autobatch.training.checkpoints.manifest import OLD_STATE, write_manifest
from tests.support.checkpoints import MANIFEST, STATE, newest, save


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    loaded = load_newest(tmp_path)
    assert (loaded.path, loaded.facts, loaded.passed_over) == (path, {"seed": 1, "step": 2}, [])
    assert torch.equal(loaded.state["weights"], torch.full((8,), 2.0))
    assert load_newest(tmp_path / "nothing") is None


def test_damaged_checkpoints_are_all_named(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / STATE).write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint in .*step-00000002.*step-00000001") as caught:
        load_newest(tmp_path)
    assert caught.value.exit_code == 2
    assert "start without --resume, or restore one of them" in str(caught.value)


def seal(path: Path, name: str) -> None:
    """Give a checkpoint with one file a valid manifest."""
    content = (path / name).read_bytes()
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(path / MANIFEST, {"step": 2, "files": {name: sums}, "facts": {"seed": 1, "step": 2}})


def test_a_checkpoint_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (path / STATE).unlink()
    torch.save({"weights": torch.full((8,), 5.0), "step": 2}, path / OLD_STATE)
    seal(path, OLD_STATE)
    loaded = load_newest(tmp_path)
    assert torch.equal(loaded.state["weights"], torch.full((8,), 5.0))
    save(tmp_path / "other", 2)
    (tmp_path / "other" / "step-00000002" / STATE).rename(path / STATE)
    loaded = load_newest(tmp_path)
    assert torch.equal(loaded.state["weights"], torch.full((8,), 5.0)), "only files of the manifest count"


class Malicious:
    """Object that writes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return (Path.touch, (self.sentinel,))


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", [STATE, OLD_STATE])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, name: str, raw: bool) -> None:
    """The manifest is right in every byte."""
    folder = tmp_path / "checkpoints"
    sentinel = tmp_path / "sentinel"
    save(folder, 1)
    path = save(folder, 2)
    (path / STATE).unlink()
    with (path / name).open("wb") as file:
        if raw:
            file.write(pickle.dumps(Malicious(sentinel)))
        else:
            torch.save({"step": Malicious(sentinel)}, file)
    seal(path, name)
    assert is_valid(path)
    loaded = load_newest(folder)
    assert loaded.state["step"] == 1
    assert f"{name} cannot be read" in loaded.passed_over[0]
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(Malicious(sentinel)))
    assert sentinel.exists(), "the pickle does what it says where it is executed"


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
