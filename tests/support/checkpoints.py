"""Small checkpoints, and kills between any two calls of the system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from autobatch import CheckpointError
from autobatch.core.files import file_entry
from autobatch.training.checkpoint import (
    MANIFEST,
    list_checkpoints,
    load_newest,
    read_manifest,
    save_checkpoint,
    sealed,
)


def save(
    folder: Path, step: int, size: int = 8, *, state: dict[str, Any] | None = None, **options: Any
) -> Path:
    state = state or {"weights": torch.full((size,), float(step)), "step": step}
    return save_checkpoint(folder, step=step, state=state, facts={"seed": 1, "step": step}, **options)


def seal(path: Path, facts: dict[str, Any]) -> None:
    """Give the files of a checkpoint valid sums."""
    files = {file.name: file_entry(file) for file in path.iterdir() if file.name != MANIFEST}
    step = int(path.name.removeprefix("step-"))
    (path / MANIFEST).write_bytes(sealed({"step": step, "files": files, "facts": facts}))


def is_valid(path: Path) -> bool:
    """Return whether a checkpoint is unchanged since it was written."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def newest(folder: Path) -> int | None:
    """Return the step of the newest valid checkpoint; None if there is no checkpoint."""
    return load_newest(folder).state["step"] if list_checkpoints(folder) else None


def leftovers(folder: Path) -> list[str]:
    """Return the half-written folders."""
    return [path.name for path in folder.iterdir() if "tmp" in path.name]
