"""The manifest of a checkpoint: what its files must be, sealed with a sum of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from autobatch.core.errors import CheckpointError

SCHEMA = 1


MANIFEST = "manifest.json"


STATE = "state.pt"


_SEAL = b'{"sha256": "'


_SEALED = len(_SEAL) + 64 + 2
"""Where what the manifest's own sum covers begins."""


def write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write tensors and plain values, and flush them to the disk.

    Returns:
        Size in bytes and SHA-256, as the manifest lists them.

    Raises:
        OSError: the system's own error, which ``torch.save`` hides.
    """
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


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest as JSON whose first entry is the SHA-256 of all that follows, and flush it.

    Raises:
        OSError: it cannot be written.
    """
    body = json.dumps({"schema": SCHEMA, **manifest}, indent=1)[1:].encode()
    with path.open("wb") as file:
        file.write(_SEAL + _sum_of(body) + b'",' + body)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``path``.

    Raises:
        CheckpointError: it is missing, changed, no manifest, or of a future version.
    """
    try:
        content = (path / MANIFEST).read_bytes()
        manifest = json.loads(content)
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read ({type(error).__name__})") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: written in format {schema}, this version reads {SCHEMA}")
    body = content[_SEALED:]
    if content != _SEAL + _sum_of(body) + b'",' + body:
        raise CheckpointError(f"{path}: {MANIFEST} was changed after it was written (SHA-256 differs)")
    files = manifest.get("files")
    if not (isinstance(files, dict) and STATE in files and isinstance(manifest.get("facts"), dict)):
        raise CheckpointError(f"{path}: {MANIFEST} names no {STATE}")
    if not all(isinstance(one, dict) and {"bytes", "sha256"} <= one.keys() for one in files.values()):
        raise CheckpointError(f"{path}: {MANIFEST} gives no size and sum of its files")
    return dict(manifest)


def check_files(path: Path, manifest: Mapping[str, Any], *, sums: bool = True) -> None:
    """Check the files of the checkpoint ``path``.

    Args:
        path: its folder.
        manifest: what they must be.
        sums: read them whole and compare the sums, not only the sizes.

    Raises:
        CheckpointError: one is not what it must be; names it and what is wrong.
    """
    for name, expected in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
            found = expected["sha256"]
            if sums and size == expected["bytes"]:
                with (path / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror})") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {name} has {size} bytes instead of {expected['bytes']}")
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")


class _Digest:
    """A file that is hashed while it is written; keeps the system's own error."""

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


def _sum_of(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
