"""Checkpoints that survive being killed at any instant, and that are never trusted unread.

A checkpoint is a folder ``step-N``. It is written as ``step-N.tmp-PID``, every file flushed to the disk, the
manifest with their sizes and SHA-256 sums last; then the folder is renamed and its parent flushed. So a folder
called ``step-N`` is whole, and what is damaged afterwards is seen when it is read: it is named and passed over,
never deleted. Tensors are loaded with ``weights_only``: nothing that a file holds is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from autobatch.errors import CheckpointError
from autobatch.files import sync_directory

SCHEMA = 1
MANIFEST = "manifest.json"
STATE = "state.pt"
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
        files = {STATE: _write_state(temporary / STATE, state)}
        manifest = {"schema": SCHEMA, "step": step, "files": files, "facts": dict(facts)}
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_directory(temporary)
        if target.exists():
            # The same step again, after a resume: what stands there is set aside until the new one stands.
            target.rename(_trash(target))
        temporary.rename(target)
        sync_directory(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {error.strerror or error}; "
            "earlier checkpoints are untouched: make room or choose another --out, then --resume"
        ) from error
    _prune(folder, keep_last=keep_last, spare={target, spare})
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
        except Exception as error:  # noqa: BLE001 - whatever a hostile or foreign file makes the reader raise
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
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        schema, files, facts = manifest["schema"], manifest["files"], manifest["facts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read ({type(error).__name__})") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: written in format {schema}, this version reads {SCHEMA}")
    if not isinstance(files, dict) or STATE not in files or not isinstance(facts, dict):
        raise CheckpointError(f"{path}: {MANIFEST} names no {STATE}")
    for name, expected in files.items():
        try:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{path}: {name} has {size} bytes instead of {expected['bytes']}")
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror})") from None
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")
    return dict(manifest)


def clean_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written; what was set aside comes back if nothing replaced it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        published = folder / path.name.split(".")[0]
        if ".trash-" in path.name and not published.exists() and _is_valid(path):
            path.rename(published)
        else:
            shutil.rmtree(path, ignore_errors=True)


class _Digest:
    """A file that is hashed while it is written; keeps the system's own error, which torch.save hides."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            self.file.write(content)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(content)
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        self.file.flush()


def _write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    with path.open("wb") as file:
        digest = _Digest(file)
        try:
            torch.save(dict(state), digest)  # type: ignore[arg-type]
        except RuntimeError:
            if digest.error is None:
                raise
        if digest.error is not None:
            raise digest.error
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": digest.size, "sha256": digest.sha256.hexdigest()}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _prune(folder: Path, *, keep_last: int, spare: set[Path | None]) -> None:
    """Drop the oldest over ``keep_last``; each disappears by one rename, so that none is ever half there."""
    for path in list_checkpoints(folder)[:-keep_last]:
        if path in spare or not (path / MANIFEST).is_file():
            continue
        try:
            path.rename(_trash(path))
        except OSError:
            continue
        shutil.rmtree(_trash(path), ignore_errors=True)
    for trash in folder.glob(f"step-*.trash-{os.getpid()}"):
        shutil.rmtree(trash, ignore_errors=True)


def _trash(path: Path) -> Path:
    return path.with_name(f"{path.name}.trash-{os.getpid()}")


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True
