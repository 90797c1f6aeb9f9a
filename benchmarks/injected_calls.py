"""Failing calls of the system at every point of a run: on its folder, checkpoints, metrics and result.

A call fails once (EIO), or the disk is full or read-only from there on. A run must end as the undisturbed
one, or end in one line; then it must have lost no checkpoint, and resume to the same weights.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from autobatch import AutobatchError
from autobatch.api.pipeline import run_command
from autobatch.report import page
from autobatch.training.checkpoint import is_valid, list_checkpoints
from autobatch.training.run_folder import CHECKPOINTS
from benchmarks.report import Findings
from benchmarks.tiny_run import tiny_run, weights_of

STEPS, KEPT = 4, 2
READING = ("stat", "lstat", "listdir", "scandir")
CHANGING = ("mkdir", "rename", "replace", "unlink", "rmdir", "chmod", "utime")
ALLOCATING = ("mkdir", "write", "create", "fsync")


class Failure(NamedTuple):
    """A way in which calls fail."""

    number: int
    calls: tuple[str, ...]
    """Names of the calls that fail."""
    is_lasting: bool
    """True if all of them fail from some call on, False if one fails."""


FAILURES = {
    "one call fails (EIO)": Failure(errno.EIO, (*READING, *CHANGING, *ALLOCATING, "open", "read"), False),
    "the disk is full (ENOSPC)": Failure(errno.ENOSPC, ALLOCATING, True),
    "the disk is read-only (EROFS)": Failure(errno.EROFS, (*CHANGING, *ALLOCATING), True),
}


class SystemCalls:
    """Calls of the system on a folder, which are counted and may fail.

    Args:
        root: the folder; calls on other files are let through.
        failure: how calls fail; None if none do.
        at: the number of the first call that fails, among those that the failure is about.
        shorten: let each write take half of its bytes at most.
    """

    def __init__(
        self, root: Path, failure: Failure | None = None, at: int | None = None, *, shorten: bool = False
    ) -> None:
        self._root = f"{root.resolve()}{os.sep}"
        self._failure, self._at = failure, at
        self.shortens = shorten
        self.names: list[str] = []
        """The calls so far, by their names."""
        self._count = 0
        self.hinders_cleaning = False
        """True if a call failed that deletes."""

    def call(self, name: str, file: Any) -> None:
        """Note a call on a file, and raise if it is to fail."""
        if not self._is_inside(file):
            return
        self.names.append(name)
        if self._failure is None or name not in self._failure.calls or self._at is None:
            return
        self._count += 1
        number = self._count - 1
        if number == self._at or (self._failure.is_lasting and number > self._at):
            self.hinders_cleaning |= name not in ALLOCATING
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
                whole = memoryview(data).cast("B")
                return super().write(whole[: -(-len(whole) // 2)] if calls.shortens else whole)

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
            for name in (*READING, *CHANGING, "fsync", "open"):
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


def fail_everywhere(root: Path, stride: int = 1) -> Findings:
    """Resume a run again and again, with calls of the system that fail from another one on each time.

    Args:
        root: an empty folder.
        stride: calls from one failure to the next.
    """
    begun, folder, findings = root / "begun", root / "injected", Findings()
    expected = weights_of(_fit(begun, resume=False))
    shutil.rmtree(list_checkpoints(begun / CHECKPOINTS)[-1])

    def attempt(calls: SystemCalls) -> tuple[str, str]:
        shutil.copytree(begun, folder)
        try:
            return _outcome(folder, calls, expected)
        finally:
            shutil.rmtree(folder)

    for kind, failure in FAILURES.items():
        unharmed = SystemCalls(folder)
        attempt(unharmed)
        for at in range(0, sum(name in failure.calls for name in unharmed.names), stride):
            found, fault = attempt(SystemCalls(folder, failure, at))
            findings.add(kind, found, f"call {at}: {fault}" if fault else "")
    findings.add("every write takes half of its bytes", *attempt(SystemCalls(folder, shorten=True)))
    with _signals():
        findings.add("a signal interrupts calls all the time (EINTR)", *attempt(SystemCalls(folder)))
    return findings


@contextmanager
def _signals() -> Iterator[None]:
    """Interrupt this process two thousand times per second within the block."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _fit(folder: Path, *, resume: bool) -> nn.Module:
    """Train and write everything but the drawings of the report."""
    run = tiny_run(folder, resume=resume, steps=STEPS, keep_last=KEPT, validate_every=2)
    with mock.patch.object(page, "render", return_value="page"):
        model: nn.Module = run_command(run).model
    return model


def _outcome(folder: Path, calls: SystemCalls, expected: torch.Tensor) -> tuple[str, str]:
    """Resume with failing calls, and again without; return how the first ended, and what is wrong."""
    before = len(list_checkpoints(folder / CHECKPOINTS))
    found, fault = "the same weights", ""
    with calls.injected():
        try:
            if not torch.equal(weights_of(_fit(folder, resume=True)), expected):
                return "other weights", "other weights"
        except AutobatchError as error:
            found = f"exit {error.exit_code}"
            if "\n" in str(error) or str(folder) not in str(error):
                fault = f"says {str(error)!r}"
        except Exception as error:
            found, fault = type(error).__name__, repr(error)
    valid = sum(map(is_valid, list_checkpoints(folder / CHECKPOINTS)))
    if valid < min(KEPT, before):
        fault += f" only {valid} of {before} checkpoints are valid"
    if (left := _left_in(folder)) and not calls.hinders_cleaning:
        fault += f" left {left}"
    if not torch.equal(weights_of(_fit(folder, resume=True)), expected):
        fault += " other weights after the next resume"
    left = _left_in(folder)
    return found, fault + (f" left {left} after the next resume" if left else "")


def _left_in(folder: Path) -> list[str]:
    """Return what should have been cleaned."""
    return [path.name for path in folder.rglob("*") if "tmp" in path.name or ".trash" in path.name]
