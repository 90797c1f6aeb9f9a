"""Checkpoints on full and failing disks, and kills between any two calls of the system."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autobatch import CheckpointError, DoesNotFitError
from autobatch.training import checkpoint
from autobatch.training.checkpoint import begin_after, list_checkpoints
from tests.support.checkpoints import is_valid, leftovers, newest, save
from tests.support.runs import HINT, ActingAfter, open_loop, resume, saved_steps, settings, train
from tests.support.training import fingerprint, make_workload


class Killed(BaseException):
    """Stands for the end of the process."""


class SystemCalls:
    """Counts the calls of the system that change a folder, and kills at one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10_000
        """Calls before the kill."""
        for owner, name in [
            *((os, name) for name in ("mkdir", "rename", "unlink", "rmdir", "fsync", "open")),
            *((Path, name) for name in ("mkdir", "rename", "replace", "unlink")),
            (shutil, "rmtree"),
        ]:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        # A killed process runs no error handler: they all begin with this.
        suppress = contextlib.suppress
        monkeypatch.setattr(checkpoint.contextlib, "suppress", lambda *kinds: self._end() or suppress(*kinds))

    def _end(self) -> None:
        if self.left < 0:
            raise Killed

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            self._end()
            return call(*args, **kwargs)

        return counted


@pytest.mark.parametrize("which", range(5))
def test_a_failed_flush_is_a_failed_checkpoint(tmp_path: Path, monkeypatch, which: int) -> None:
    """State, folder, manifest, folder and parent folder are flushed, and each flush may fail."""
    save(tmp_path, 1)
    calls = iter(range(10))

    def fsync(descriptor: int) -> None:
        if next(calls) == which:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert newest(tmp_path) == (2 if which == 4 else 1)
    assert is_valid(tmp_path / "step-00000001")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("saved", [1, 3, 4])
def test_a_kill_between_any_two_calls_loses_only_the_checkpoint_that_is_being_written(
    saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No moment has fewer valid checkpoints than are kept, and the next start cleans up."""
    calls = SystemCalls(monkeypatch)
    for step in range(1, saved + 1):
        save(tmp_path / "base", step, keep_last=3)
    shutil.copytree(tmp_path / "base", tmp_path / "dry")
    calls.left = 10_000
    save(tmp_path / "dry", saved + 1, keep_last=3)
    number = 10_000 - calls.left
    kept = [path.name for path in list_checkpoints(tmp_path / "dry")]
    assert kept == [f"step-{step:08d}" for step in range(max(1, saved - 1), saved + 2)]
    assert number > 10
    for at in range(number):
        folder = tmp_path / f"killed-{at}"
        calls.left = 10_000
        shutil.copytree(tmp_path / "base", folder)
        calls.left = at
        with pytest.raises(Killed):
            save(folder, saved + 1, keep_last=3)
        calls.left = 10_000
        assert sum(is_valid(path) for path in list_checkpoints(folder)) >= min(3, saved)
        begin_after(folder, saved + 1)
        assert newest(folder) in (saved, saved + 1)
        assert leftovers(folder) == []
        assert sum(is_valid(path) for path in list_checkpoints(folder)) >= min(3, saved)
        shutil.rmtree(folder)


@pytest.mark.parametrize("times", [1, 99])
def test_memory_that_runs_out_while_a_checkpoint_is_written_ends_the_run(
    tmp_path: Path, monkeypatch, times: int
) -> None:
    write, errors = torch.save, [1] * times

    def fail(state, file):
        if (tmp_path / "checkpoints/step-00000002").exists() and isinstance(file, BufferedWriter) and errors:
            errors.pop()
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")
        return write(state, file)

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(DoesNotFitError, match=r"while the checkpoint of step 4 was .* earlier .* intact"):
        train(open_loop(), settings(tmp_path, checkpoint_every=2))
    # The state of the step is intact, so that a second attempt may write it.
    assert saved_steps(tmp_path) == ([2, 4] if times == 1 else [2])
    assert not leftovers(tmp_path / "checkpoints")


# Whole runs on a full disk.


class Large(nn.Module):
    """Model whose state exceeds the file limit below, unlike a line of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3).double()
        self.register_buffer("table", torch.zeros(50_000))

    def forward(self, inputs):
        return self.body(inputs)


@pytest.mark.parametrize("has_signal", [False, True])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, has_signal: bool) -> None:
    """A limit on file sizes makes write() fail, which torch.save alone would hide."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
        if has_signal:
            os.kill(os.getpid(), signal.SIGTERM)

    run, loop = settings(tmp_path, checkpoint_every=1), open_loop(make_workload(model=Large))
    try:
        with pytest.raises(
            CheckpointError, match=r"step 3 could not be written to .*File too large.*Free some space"
        ) as caught:
            train(loop, run, ActingAfter(3, fill_disk))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert HINT in caught.value.__notes__[0]
    assert (saved_steps(tmp_path), leftovers(tmp_path / "checkpoints")) == ([1, 2], [])
    loop, _ = resume(tmp_path, make_workload(model=Large))
    straight = open_loop(make_workload(model=Large))
    list(straight.run())
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)
