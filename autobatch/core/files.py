"""Files, which are written whole or not at all, and read with every failure as one line; those of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.records import StepRecord
from autobatch.core.text import one_line

if TYPE_CHECKING:  # half of what this module imports
    from importlib.resources.abc import Traversable


UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""Failures of decoding and converting: also integers of 5,000 digits, and deep nesting."""


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """Read a TOML file; raise `InputError`, one line with the path, if it cannot be read."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return tomllib.loads(content.decode())
    except UNREADABLE as error:
        raise InputError(f"{path} is not TOML: {one_line(error, limit=200)}") from error


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Replace a file at the end of the block, so that a reader sees the old one or the new one, never a part.

    Missing parent directories are created. The path that is yielded lies in the same directory. If an
    `OSError` is raised, the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        temporary.chmod(mode)  # some writers set one of their own
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # else the temporary name, or none if the disk is full
        raise


def write_atomic(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path``, whole or not at all; see `replaced_file`. Return ``path``."""
    with replaced_file(path) as temporary, temporary.open("wb") as file:
        file.write(content)
    return path


def file_entry(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a file, as the manifest of a checkpoint lists it."""
    # Only here: the import takes 10 ms, and the help does not need it.
    import hashlib

    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


def clean_unfinished(folder: Path) -> None:
    """Delete the temporary files that a process left in a folder when it was killed."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, if the system can open and flush a directory."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(directory, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
                raise


METRICS = "metrics.jsonl"
WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "model-ema.safetensors"
"""The averages in place of the weights, with the buffers of the model."""
RESULT = "result.json"
REPORT = "report.html"


def read_steps(path: Path) -> Iterator[tuple[bytes, StepRecord]]:
    """Yield the lines of a file of metrics and their records; leave out what a killed run wrote in part."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(*UNREADABLE):
            yield line, msgspec.json.decode(line, type=StepRecord)
