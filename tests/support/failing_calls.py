"""Calls of the system on the files of a run, which are counted and may fail."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

READING = ("stat", "lstat", "listdir", "scandir", "open", "read")
CHANGING = ("rename", "replace", "unlink", "rmdir", "chmod", "utime")
ALLOCATING = ("mkdir", "write", "create", "fsync")


class Failure(NamedTuple):
    """A way in which calls fail: its number, which calls, and if all fail from some call on, or one."""

    number: int
    calls: tuple[str, ...]
    is_lasting: bool


FAILURES = {
    "one call fails (EIO)": Failure(errno.EIO, (*READING, *CHANGING, *ALLOCATING), False),
    "the disk is full (ENOSPC)": Failure(errno.ENOSPC, ALLOCATING, True),
    "the disk is read-only (EROFS)": Failure(errno.EROFS, (*CHANGING, *ALLOCATING), True),
}


class FailingCalls:
    """Calls of the system on a folder. Calls on other files are let through.

    Args:
        root: the folder.
        failure: how calls fail.
        at: the number of the first call that fails, among those that can; None if none does.
    """

    def __init__(self, root: Path, failure: Failure, at: int | None) -> None:
        self._root = f"{root.resolve()}{os.sep}"
        self._failure, self._at = failure, at
        self.count = 0
        """The calls so far that can fail."""

    def call(self, name: str, file: Any) -> None:
        """Count a call on a file, and raise if it is to fail."""
        if name not in self._failure.calls or not self._is_inside(file):
            return
        self.count += 1
        after = -1 if self._at is None else self.count - 1 - self._at
        if after == 0 or (self._failure.is_lasting and after > 0):
            raise OSError(self._failure.number, os.strerror(self._failure.number), str(file))

    def _is_inside(self, file: Any) -> bool:
        if isinstance(file, int):
            with suppress(OSError):
                file = real_readlink(f"/proc/self/fd/{file}")
        return isinstance(file, str | Path) and f"{os.path.abspath(file)}{os.sep}".startswith(self._root)

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Let the calls of this process pass through here within the block."""
        calls = self

        class File(io.FileIO):
            def __init__(self, file: Any, mode: str) -> None:
                creates = any(one in mode for one in "wxa") and not os.path.lexists(file)
                calls.call("create" if creates else "open", file)
                super().__init__(file, mode)

            def write(self, data: Any) -> Any:
                calls.call("write", self.name)
                return super().write(data)

            def readinto(self, buffer: Any) -> Any:
                calls.call("read", self.name)
                return super().readinto(buffer)

            def readall(self) -> Any:
                calls.call("read", self.name)
                return super().readall()

        def opened(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **more: Any) -> Any:
            if not self._is_inside(os.fspath(file) if not isinstance(file, int) else file):
                return real_open(file, mode, buffering, *text, **more)
            raw = File(os.fspath(file), mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            kind: Any = io.BufferedReader if mode.strip("bt") == "r" else io.BufferedWriter
            buffer = io.BufferedRandom(raw) if "+" in mode else kind(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, *text, **more)

        real_open = open
        with ExitStack() as held:
            for name in (*READING[:5], *CHANGING, "mkdir", "fsync"):
                held.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            for module in ("io", "builtins"):
                held.enter_context(mock.patch(f"{module}.open", opened))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any = ".", *args: Any, **more: Any) -> Any:
            folder = more.get("dir_fd")
            self.call(name, file if folder is None else folder)
            return real(file, *args, **more)

        return call


real_readlink = os.readlink
