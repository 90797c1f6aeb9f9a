"""Files that are written whole or not at all, and read with every failure as one line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import tomllib
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.text import cut, one_line

UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""Failures of decoding and converting: also integers of 5,000 digits, and deep nesting."""


LONGEST_INTEGER = 20
"""Characters of the longest integer of 64 bits, with its sign."""


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: the file cannot be read, or is no JSON; the message is one line with the path.
    """
    return _read(path, _decode_json, "JSON")


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        InputError: the file cannot be read, or is no TOML; the message is one line with the path.
    """
    found: dict[str, Any] = _read(path, lambda content: tomllib.loads(content.decode()), "TOML")
    return found


def _read(path: Path | Traversable, parse: Callable[[bytes], Any], kind: str) -> Any:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        raise InputError(f"{path} cannot be read: {_reason(error)}") from error
    try:
        return parse(content)
    except UNREADABLE as error:
        raise InputError(f"{path} is not {kind}: {_reason(error)}") from error


def _decode_json(content: bytes) -> Any:
    """Decode JSON whose numbers fit in 64 bits; Python would also take NaN and integers of any length."""
    text = content.decode()
    return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_refuse)


def _integer(text: str) -> int:
    number = int(text) if len(text) <= LONGEST_INTEGER else None
    return _refuse(text) if number is None or not -(2**63) <= number < 2**63 else number


def _number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"the number {cut(text, LONGEST_INTEGER)} is out of range")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return one_line(getattr(error, "strerror", None) or error, limit=200)


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with NUL
        return False


def write_atomic(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part.

    A temporary file in the same directory is written, flushed to the disk and renamed over ``path``. Missing
    parent directories are created. A file that is replaced keeps its mode; a new one gets the mode that the
    umask allows.

    Args:
        path: the file to write.
        content: all bytes of the file.

    Returns:
        ``path``.

    Raises:
        OSError: the directory or the file cannot be written; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    mode = _mode_of(path)
    # Never more open than the file that is replaced, not even while it is written.
    try:
        handle = create_file(temporary, mode=0o666 if mode is None else mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # else the temporary name, or none if the disk is full
        raise
    sync_directory(path.parent)
    return path


def create_file(path: Path, *, mode: int = 0o666) -> int:
    """Create a file that must not exist, with the mode less the umask, and return its descriptor.

    Only the system applies the umask without changing it for other threads.

    Raises:
        OSError: the file exists or cannot be created.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)


def _mode_of(path: Path) -> int | None:
    """Return the mode of a file; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    return None


def sync_directory(directory: Path) -> None:
    """Flush the rename to the disk, if the system can open a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_output(path: Path, content: bytes, option: str) -> Path:
    """Write a file that an option asked for, atomically.

    Raises:
        InputError: it cannot be written; the message names the option.
    """
    try:
        return write_atomic(path, content)
    except OSError as error:
        raise InputError(
            f"{option} {path} cannot be written: {error.strerror or error}. Give another file"
        ) from error
