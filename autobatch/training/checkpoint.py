"""Checkpoints that survive being killed at any instant, and that are never trusted unread.

A checkpoint is a folder ``step-N``. It is written as ``step-N.tmp-PID``, every file flushed to the disk, the
manifest with their sizes and SHA-256 sums (and its own) last; then the folder is renamed and its parent
flushed. So a folder called ``step-N`` is whole, and what is damaged afterwards is seen when it is read: it is
named and passed over, never deleted. Tensors are loaded with ``weights_only``: nothing that a file holds is
executed.

    step-N.tmp-PID ──► step-N ──► step-N.trash-PID ──► gone          (over ``keep_last``)
                          └─────► step-N.damaged-K                   (a run came to the same step again)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autobatch.core.errors import CheckpointError
from autobatch.training.manifest import (
    MANIFEST,
    STATE,
    check_files,
    read_manifest,
    write_manifest,
    write_state,
)

_NAME = re.compile(r"step-(\d+)")


_LEFTOVER = re.compile(r"step-\d+\.(?:tmp|trash)-\d+")


class Loaded(NamedTuple):
    """The newest checkpoint that is valid."""

    path: Path
    state: dict[str, Any]
    facts: dict[str, Any]
    """What was written beside the state: the plan, the versions, the counters."""
    passed_over: list[str]
    """Newer ones that are damaged, and why; a line each."""


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    keep_last: int = 3,
    spare: Path | None = None,
) -> Path:
    """Write a checkpoint, then drop those over ``keep_last``, oldest first.

    Args:
        folder: where all checkpoints of the run stand.
        step: windows seen; names the checkpoint.
        state: tensors and plain values, as ``torch.load(weights_only=True)`` can read them.
        facts: what a person or a resume needs to know without loading tensors; JSON.
        keep_last: how many to keep.
        spare: never dropped: the one that the run was resumed from.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    target = folder / f"step-{step:08d}"
    temporary = folder / f"{target.name}.tmp-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        files = {STATE: write_state(temporary / STATE, state)}
        write_manifest(temporary / MANIFEST, {"step": step, "files": files, "facts": dict(facts)})
        _sync_directory(temporary)
        if target.exists():
            # The same step again, after a resume: what stands there is set aside until the new one stands.
            target.rename(_trash(target) if is_valid(target) else _damaged(target))
        temporary.rename(target)
        _sync_directory(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if _trash(target).exists() and not target.exists():
                _trash(target).rename(target)
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {error.strerror or error}; "
            "earlier checkpoints are untouched: make room there and go on from the newest"
        ) from error
    shutil.rmtree(_trash(target), ignore_errors=True)
    _prune(folder, step=step, keep_last=keep_last, spare={target, spare})
    return target


def load_newest(folder: Path) -> Loaded | None:
    """Load the newest valid checkpoint; damaged ones are passed over, by name.

    Returns:
        What was loaded; ``None`` where there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    passed_over: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            manifest = verify(path)
            state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        except Exception as error:  # whatever a hostile or foreign file makes the reader raise
            passed_over.append(f"{path}: {STATE} cannot be read ({type(error).__name__})")
            continue
        return Loaded(path, state, manifest["facts"], passed_over)
    if passed_over:
        raise CheckpointError(f"no checkpoint in {folder} is valid: " + "; ".join(passed_over))
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """All published checkpoints, oldest first, valid or not."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def verify(path: Path) -> dict[str, Any]:
    """Check a checkpoint's files against its manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: it is damaged or of a future version; names the file and what is wrong.
    """
    manifest = read_manifest(path)
    check_files(path, manifest)
    return manifest


def is_valid(path: Path) -> bool:
    """Whether a checkpoint is as it was written."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def clean_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written; what it only set aside comes back."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        published = folder / path.name.split(".")[0]
        if ".trash-" in path.name and not published.exists() and is_valid(path):
            path.rename(published)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """Make renames durable; file systems that cannot flush a directory say so, and are taken at that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def _prune(folder: Path, *, step: int, keep_last: int, spare: set[Path | None]) -> None:
    """Drop the oldest over ``keep_last``; each disappears by one rename, so that none is ever half there.

    Damaged ones are not counted and not dropped; later steps than this are of a run that was given up
    because they are damaged.
    """
    whole = [path for path in list_checkpoints(folder) if _number(path) <= step and _looks_whole(path)]
    for path in whole[:-keep_last]:
        if path in spare:
            continue
        # What cannot be dropped today (another's permissions, say) is tried again at the next checkpoint.
        with contextlib.suppress(OSError):
            path.rename(_trash(path))
            shutil.rmtree(_trash(path))


def _looks_whole(path: Path) -> bool:
    """Whether manifest and sizes are right; sums are only read where a checkpoint is loaded."""
    try:
        check_files(path, read_manifest(path), sums=False)
    except CheckpointError:
        return False
    return True


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _trash(path: Path) -> Path:
    return path.with_name(f"{path.name}.trash-{os.getpid()}")


def _damaged(path: Path) -> Path:
    number = 1
    while path.with_name(f"{path.name}.damaged-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.damaged-{number}")
