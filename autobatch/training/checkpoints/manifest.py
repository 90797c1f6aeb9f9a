"""Manifest of a checkpoint: sizes and SHA-256 sums of its files, protected by a sum of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autobatch.core.errors import CheckpointError
from autobatch.device.oom import is_oom

SCHEMA = 4
"""Format of checkpoints; 4 has the random states and the limits of all ranks."""
MANIFEST = "manifest.json"
_PREFIX = b'{"sha256": "'
_BODY_START = len(_PREFIX) + 64 + 2
"""Offset of the first byte that the manifest's own sum covers."""


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a file, and flush it to the disk.

    Returns:
        Size in bytes and SHA-256, as the manifest lists them.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest as JSON that begins with the SHA-256 of the rest, and flush it to the disk.

    Raises:
        OSError: the file cannot be written.
    """
    body = json.dumps({"schema": SCHEMA, **manifest}, indent=1)[1:].encode()
    write_file(path, _PREFIX + _sum_of(body) + b'",' + body)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``path``.

    Raises:
        CheckpointError: it is missing, changed, incomplete, or has another format.
        Exception: memory ran out, which says nothing about the file; see `autobatch.device.oom`.
    """
    try:
        content = (path / MANIFEST).read_bytes()
        manifest = json.loads(content)
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if is_oom(error):
            raise
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read ({type(error).__name__})") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: {MANIFEST} has format {schema}, and this version reads {SCHEMA}")
    body = content[_BODY_START:]
    if content != _PREFIX + _sum_of(body) + b'",' + body:
        raise CheckpointError(f"{path}: {MANIFEST} was changed after it was written (SHA-256 differs)")
    files = manifest.get("files")
    if not (isinstance(files, dict) and isinstance(manifest.get("facts"), dict)):
        raise CheckpointError(f"{path}: {MANIFEST} lists no files")
    if not all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values()):
        raise CheckpointError(f"{path}: {MANIFEST} lists files without size and sum")
    if not all(Path(name).name == name for name in files):
        raise CheckpointError(f"{path}: {MANIFEST} lists files outside of the checkpoint")
    return dict(manifest)


def check_files(
    path: Path, manifest: Mapping[str, Any], *, sums: bool = True, part: tuple[int, int] = (0, 1)
) -> None:
    """Check the files of the checkpoint ``path``: those of the manifest, and no others.

    Args:
        path: its folder.
        manifest: the expected sizes and sums.
        sums: also read every file and compare its sum, not only its size.
        part: the rank, and the number of ranks that compare the sums of all files together.

    Raises:
        CheckpointError: a file differs; names it and the fault.
        Exception: memory ran out, which says nothing about the file; see `autobatch.device.oom`.
    """
    rank, world = part
    for number, (name, expected) in enumerate(sorted(manifest["files"].items())):
        try:
            size = (path / name).stat().st_size
            found = expected["sha256"]
            if sums and number % world == rank and size == expected["bytes"]:
                with (path / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            if is_oom(error):
                raise
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror})") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {name} must have {expected['bytes']} bytes, found {size}")
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")
    # The readers of tensors take every such file of the folder.
    for name in sorted(one.name for one in path.glob("*.safetensors")):
        if name not in manifest["files"]:
            raise CheckpointError(f"{path}: {name} is not listed in {MANIFEST}")


def _sum_of(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
