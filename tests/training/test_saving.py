"""Saving against full disks, kills between any two calls of the system, and pruning."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
from pathlib import Path

import pytest

from autobatch.core.errors import CheckpointError
from autobatch.training import checkpoint
from autobatch.training.checkpoint import clean_leftovers, is_valid, list_checkpoints, save_checkpoint
from tests.training.test_checkpoint import MANIFEST, STATE, newest, save


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "tmp" in path.name or "trash" in path.name]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so(tmp_path: Path) -> None:
    """A limit on the size of files makes write() itself fail; torch.save alone would hide why."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be written to .*File too large.*free some space"
        ):
            save(tmp_path, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest(tmp_path) == 1
    assert leftovers(tmp_path) == []
    save(tmp_path, 3, size=100_000)
    assert newest(tmp_path) == 3


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_flush_that_fails_is_a_checkpoint_that_failed(tmp_path: Path, monkeypatch, which, number) -> None:
    """The state, the manifest, the folder, and the folder above it are flushed; each may fail."""
    save(tmp_path, 1)
    calls = iter(range(10))

    def fsync(descriptor: int) -> None:
        if next(calls) == which:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert newest(tmp_path) == (2 if which == 3 else 1)
    assert is_valid(tmp_path / "step-00000001")
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        if os.access(folder, os.W_OK):
            pytest.skip("Requires: a user whom permissions bind")
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(folder, 2)
    finally:
        folder.chmod(stat.S_IRWXU)
    assert newest(folder) == 1


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(tmp_path, 2)
    assert newest(tmp_path) == 1


def test_a_place_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file", 1)


def test_what_cannot_be_written_at_all_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, step=2, state={"f": lambda: None}, facts={})
    assert leftovers(tmp_path) == []
    assert newest(tmp_path) == 1


class Killed(BaseException):
    """The process ends here."""


class Boundary:
    """Ends the process before the call of the system with a given number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10_000
        self.count = 0
        self.look = lambda: None
        for owner, name in [
            *((os, name) for name in ("mkdir", "rename", "unlink", "rmdir", "fsync", "open")),
            *((Path, name) for name in ("mkdir", "rename", "unlink")),
            (shutil, "rmtree"),
        ]:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            self.count += 1
            self.left -= 1
            self.look()
            if self.left < 0:
                raise Killed
            return call(*args, **kwargs)

        return counted


def test_at_no_call_of_the_system_are_there_fewer_than_are_to_be_kept(tmp_path: Path, monkeypatch) -> None:
    boundary = Boundary(monkeypatch)
    fewest = []

    def look() -> None:
        if made:
            valid = sum(is_valid(path) for path in list_checkpoints(tmp_path))
            assert valid >= min(3, made), f"{valid} of {made}"
            fewest.append(valid)

    made = 0  # the steps run from 1, so this is the last one that was acknowledged
    for step in range(1, 8):
        boundary.look = look
        save(tmp_path, step, keep_last=3)
        boundary.look = lambda: None
        made = step
        assert [p.name[-1] for p in list_checkpoints(tmp_path)] == [
            str(s) for s in range(max(1, step - 2), step + 1)
        ]
    assert len(fewest) > 50


@pytest.mark.parametrize("resumed", [None, 3])
def test_killed_between_any_two_calls_the_newest_is_whole(tmp_path: Path, monkeypatch, resumed) -> None:
    """A kill loses what was being written and nothing else; the next start cleans up after it."""
    boundary = Boundary(monkeypatch)
    base = tmp_path / "base"
    for step in (1, 2, 3):
        save(base, step)
    boundary.count = 0
    resumed_from = None if resumed is None else base / f"step-{resumed:08d}"
    shutil.copytree(base, tmp_path / "dry")
    boundary.count = 0
    save(tmp_path / "dry", 4, keep_last=2)
    calls = boundary.count
    assert calls > 10
    # An error handler would run where a killed process runs none: they all begin with this.
    suppress = contextlib.suppress
    monkeypatch.setattr(
        checkpoint.contextlib, "suppress", lambda *kinds: _Gone() if boundary.left < 0 else suppress(*kinds)
    )
    for at in range(calls):
        folder = tmp_path / f"killed-{at}"
        boundary.left = 10_000
        shutil.copytree(base, folder)
        boundary.left = at
        with pytest.raises(Killed):
            save(folder, 4, keep_last=2, protected=resumed_from and folder / resumed_from.name)
        boundary.left = 10_000
        assert newest(folder) in (3, 4)
        clean_leftovers(folder)
        assert newest(folder) in (3, 4)
        assert leftovers(folder) == []
        assert sum(is_valid(path) for path in list_checkpoints(folder)) >= 2
        shutil.rmtree(folder)


class _Gone:
    def __enter__(self) -> None:
        raise Killed

    def __exit__(self, *_: object) -> None:
        pass


def test_the_one_that_was_resumed_from_is_not_dropped(tmp_path: Path) -> None:
    resumed_from = save(tmp_path, 1)
    for step in range(2, 7):
        save(tmp_path, step, keep_last=2, protected=resumed_from)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "5", "6"]


def test_damaged_ones_are_neither_counted_nor_dropped(tmp_path: Path) -> None:
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


def test_a_damaged_one_is_set_aside_when_the_run_comes_to_its_step_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / STATE).write_bytes(b"damaged")
    save(tmp_path, 2)
    assert newest(tmp_path) == 2
    assert (tmp_path / "step-00000002.damaged-1" / STATE).read_bytes() == b"damaged"
    clean_leftovers(tmp_path)
    assert (tmp_path / "step-00000002.damaged-1").is_dir()


def test_leftovers_go_and_what_was_set_aside_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    path.rename(tmp_path / "step-00000002.trash-123")
    (tmp_path / "step-00000003.tmp-123").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    clean_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000001", "step-00000002"]
    assert newest(tmp_path) == 2
