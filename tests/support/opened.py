"""Files that this process opens to write, as Python's audit hooks tell: whoever opens a file, and however."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_listening: list[set[Path]] = []
"""Sets that get each path that is opened; an audit hook cannot be removed."""
_hooked: list[bool] = []


@contextmanager
def opened_to_write() -> Iterator[set[Path]]:
    """Collect the paths that are opened to write within the block."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hear)
    paths = set[Path]()
    _listening.append(paths)
    try:
        yield paths
    finally:
        # By identity, because sets with the same paths are equal.
        _listening[:] = [other for other in _listening if other is not paths]


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _listening:
        return
    path, _, flags = args
    if isinstance(path, str | bytes | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR):
        for paths in _listening:
            paths.add(Path(os.fsdecode(path)).absolute())
