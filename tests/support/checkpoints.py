"""Small checkpoints, and kills between any two calls of the system."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import CheckpointError
from autobatch.training import checkpoint
from autobatch.training.checkpoint import (
    MANIFEST,
    check_files,
    load_newest,
    read_manifest,
    save_checkpoint,
    write_manifest,
)


def save(
    folder: Path, step: int, size: int = 8, *, state: dict[str, Any] | None = None, **options: Any
) -> Path:
    state = state or {"weights": torch.full((size,), float(step)), "step": step}
    return save_checkpoint(folder, step=step, state=state, facts={"seed": 1, "step": step}, **options)


def seal(path: Path, facts: dict[str, Any]) -> None:
    """Give the files of a checkpoint valid sums."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
        if file.name != MANIFEST
    }
    step = int(path.name.removeprefix("step-"))
    write_manifest(path / MANIFEST, {"step": step, "files": files, "facts": facts})


def is_valid(path: Path) -> bool:
    """Return whether a checkpoint is unchanged since it was written."""
    try:
        check_files(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


def newest(folder: Path) -> int | None:
    """Return the step of the newest valid checkpoint."""
    loaded = load_newest(folder)
    return None if loaded is None else loaded.state["step"]


def leftovers(folder: Path) -> list[str]:
    """Return the half-written folders."""
    return [path.name for path in folder.iterdir() if "tmp" in path.name]


class Killed(BaseException):
    """Stands for the end of the process."""


class SystemCalls:
    """Counts the calls of the system that change a folder, looks around before each, and kills at one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10_000
        """Calls before the kill."""
        self.count = 0
        self.look: Callable[[], None] = lambda: None
        for owner, name in [
            *((os, name) for name in ("mkdir", "rename", "unlink", "rmdir", "fsync", "open")),
            *((Path, name) for name in ("mkdir", "rename", "unlink")),
            (shutil, "rmtree"),
        ]:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        # A killed process runs no error handler: they all begin with this.
        suppress = contextlib.suppress
        monkeypatch.setattr(
            checkpoint.contextlib, "suppress", lambda *kinds: _Kill() if self.left < 0 else suppress(*kinds)
        )

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.left -= 1
            self.look()
            if self.left < 0:
                raise Killed
            return call(*args, **kwargs)

        return counted


class _Kill:
    def __enter__(self) -> None:
        raise Killed

    def __exit__(self, *_: object) -> None:
        pass
