"""Atomic writes: a file is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part.

    A temporary file in the same directory is written, flushed to the disk and renamed over ``path``. Missing
    parent directories are created. A file that is replaced keeps its mode.

    Args:
        path: the file to write.
        content: all bytes of the file.

    Returns:
        ``path``.

    Raises:
        OSError: the directory or the file cannot be written; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_new_file_mode(path))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return path


def _new_file_mode(path: Path) -> int:
    """Return the mode of the file that is replaced; mkstemp's 0600 would hide a shared report."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    return 0o644


def sync_directory(directory: Path) -> None:
    """Flush the rename to the disk, if the system can open a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
