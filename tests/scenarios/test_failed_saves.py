"""Checkpoints on full and failing disks, and kills between any two calls of the system."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from pathlib import Path

import pytest

from autobatch.core.errors import CheckpointError, DoesNotFitError
from autobatch.core.progress import Progress
from autobatch.training.checkpoints import checkpoint
from autobatch.training.checkpoints.checkpoint import (
    clean_leftovers,
    is_valid,
    list_checkpoints,
    save_checkpoint,
)
from autobatch.training.run import train
from tests.support.checkpoints import Killed, SystemCalls, leftovers, newest, save
from tests.support.runs import STEPS, open_loop, saved_steps, settings


def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A limit on file sizes makes write() fail, which torch.save alone would hide."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be written to .*File too large.*Free some space"
        ):
            save(tmp_path, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest(tmp_path) == 1
    assert leftovers(tmp_path) == []
    save(tmp_path, 3, size=100_000)
    assert newest(tmp_path) == 3


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_flush_is_a_failed_checkpoint(tmp_path: Path, monkeypatch, which, number) -> None:
    """State, tensors, manifest, folder and parent folder are flushed, and each flush may fail."""
    save(tmp_path, 1)
    calls = iter(range(10))

    def fsync(descriptor: int) -> None:
        if next(calls) == which:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert newest(tmp_path) == (2 if which == 4 else 1)
    assert is_valid(tmp_path / "step-00000001")
    assert leftovers(tmp_path) == []


def test_a_folder_that_is_not_writable_is_named(tmp_path: Path) -> None:
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


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file", 1)


def test_state_that_no_file_can_hold_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError, match="function"):
        save_checkpoint(tmp_path, step=2, state={"f": lambda: None}, facts={})
    assert leftovers(tmp_path) == []
    assert newest(tmp_path) == 1


def test_at_no_call_of_the_system_are_fewer_valid_checkpoints_than_are_kept(
    tmp_path: Path, monkeypatch
) -> None:
    calls = SystemCalls(monkeypatch)
    fewest = []

    def look() -> None:
        if made:
            valid = sum(is_valid(path) for path in list_checkpoints(tmp_path))
            assert valid >= min(3, made), f"{valid} of {made}"
            fewest.append(valid)

    made = 0  # the last acknowledged step: steps begin at 1
    for step in range(1, 8):
        calls.look = look
        save(tmp_path, step, keep_last=3)
        calls.look = lambda: None
        made = step
        assert [p.name[-1] for p in list_checkpoints(tmp_path)] == [
            str(s) for s in range(max(1, step - 2), step + 1)
        ]
    assert len(fewest) > 50


@pytest.mark.parametrize("resumed", [None, 3])
def test_a_kill_between_any_two_calls_leaves_the_newest_checkpoint_valid(
    tmp_path: Path, monkeypatch, resumed
) -> None:
    """A kill loses only the checkpoint that is being written, and the next start cleans up."""
    calls = SystemCalls(monkeypatch)
    base = tmp_path / "base"
    for step in (1, 2, 3):
        save(base, step)
    resumed_from = None if resumed is None else base / f"step-{resumed:08d}"
    shutil.copytree(base, tmp_path / "dry")
    calls.count = 0
    save(tmp_path / "dry", 4, keep_last=2)
    number = calls.count
    assert number > 10
    for at in range(number):
        folder = tmp_path / f"killed-{at}"
        calls.left = 10_000
        shutil.copytree(base, folder)
        calls.left = at
        with pytest.raises(Killed):
            save(folder, 4, keep_last=2, protected=resumed_from and folder / resumed_from.name)
        calls.left = 10_000
        assert newest(folder) in (3, 4)
        clean_leftovers(folder)
        assert newest(folder) in (3, 4)
        assert leftovers(folder) == []
        assert sum(is_valid(path) for path in list_checkpoints(folder)) >= 2
        shutil.rmtree(folder)


def out_of_memory() -> Exception:
    return RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")


@pytest.mark.parametrize("error", [out_of_memory(), MemoryError()])
@pytest.mark.parametrize("times", [1, 99])
def test_memory_that_runs_out_while_a_checkpoint_is_written_is_told(
    tmp_path: Path, monkeypatch, error: Exception, times: int
) -> None:
    write = checkpoint.write_state

    def save(*given):
        nonlocal times
        if (tmp_path / "checkpoints" / "step-00000002").exists() and times:
            times -= 1
            raise error.with_traceback(None)
        return write(*given)

    monkeypatch.setattr(checkpoint, "write_state", save)
    recovers = times == 1
    with pytest.raises(
        DoesNotFitError, match=r"while the checkpoint of step 4 was .* Earlier .* intact"
    ) as told:
        train(open_loop(), settings(tmp_path, checkpoint_every=2), Progress(), None)
    assert told.value.exit_code == 3
    assert "--on-failed-save continue" in str(told.value)
    assert "\n" not in str(told.value)
    # The state of the step is intact, so that a second attempt may write it.
    assert saved_steps(tmp_path) == ([2, 4] if recovers else [2])
    assert not leftovers(tmp_path / "checkpoints")


def test_a_run_may_continue_without_a_checkpoint_that_lacked_memory(tmp_path: Path, monkeypatch) -> None:
    write, failures = checkpoint.write_state, [MemoryError(), out_of_memory()]

    def save(*given):
        if (tmp_path / "checkpoints" / "step-00000001").exists() and failures:
            raise failures.pop()
        return write(*given)

    monkeypatch.setattr(checkpoint, "write_state", save)
    options = settings(tmp_path, checkpoint_every=1, on_failed_save="continue")
    done = train(open_loop(), options, Progress(), None)
    assert done.failed_checkpoints == [2, 3]
    assert saved_steps(tmp_path)[-1] == STEPS
