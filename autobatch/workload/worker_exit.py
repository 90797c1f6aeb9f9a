"""Detection of loader workers that ended, so that no wait for a micro-batch lasts forever."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from autobatch.core.errors import AutobatchError

WAITS = ("connection.py", "selectors.py", "queue.py", "threading.py")
"""Modules of Python in which this process waits for a micro-batch."""
GRACE_SECONDS = 1.0
"""Time that a worker may take to end after its pipe broke."""


class LoaderWorkerCrashed(AutobatchError, RuntimeError):  # noqa: N818 - an event, as in ChildCrashed
    """A loader worker ended; the message says how, and what to do."""


class WorkerExits:
    """The exits of loader workers, noticed while the loop waits for a micro-batch and before each wait.

    torch's handler of SIGCHLD raises wherever this process happens to be, so this one takes its place.
    """

    def __init__(self) -> None:
        self._workers: list[BaseProcess] = []
        self._previous: Any = None
        """The handler of SIGCHLD before; None if this thread may not set one."""
        self._is_waiting = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Watch the processes that start within the block."""
        others = multiprocessing.active_children()
        may_handle = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")
        previous = signal.getsignal(signal.SIGCHLD) if may_handle else None
        yield
        self._workers = [process for process in multiprocessing.active_children() if process not in others]
        if may_handle:
            self._previous = signal.SIG_DFL if previous is None else previous
            signal.signal(signal.SIGCHLD, self._on_exit)

    def check(self) -> None:
        """Raise if a worker has ended.

        Raises:
            LoaderWorkerCrashed: a worker was killed, or crashed.
        """
        crash = self._find_crash()
        if crash is not None:
            raise crash

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Raise if a worker ends within the block.

        Raises:
            LoaderWorkerCrashed: a worker was killed, or crashed.
        """
        self._is_waiting = True
        try:
            yield
        except LoaderWorkerCrashed:
            raise
        except Exception as error:
            if isinstance(error, OSError | EOFError):
                self._await_exit()
            crash = self._find_crash()
            if crash is None:
                raise
            raise crash from error
        finally:
            self._is_waiting = False

    def kill(self) -> None:
        """Kill the workers, and restore the handler of SIGCHLD."""
        for process in self._workers:
            process.kill()
            process.join()
        self._workers = []
        if self._previous is not None:
            signal.signal(signal.SIGCHLD, self._previous)
            self._previous = None

    def _await_exit(self) -> None:
        """Wait for the worker whose pipe broke: the pipe closes a moment before the exit can be seen."""
        ended = wait([process.sentinel for process in self._workers], timeout=GRACE_SECONDS)
        for process in self._workers:
            if process.sentinel in ended:
                process.join(GRACE_SECONDS)

    def _on_exit(self, number: int, frame: Any) -> None:
        is_torchs = str(getattr(self._previous, "__module__", "")).startswith("torch.utils.data.")
        if callable(self._previous) and not is_torchs:
            self._previous(number, frame)
        # Outside of a wait, torch is already handling an error, or the next wait checks.
        if self._is_waiting and frame is not None and Path(frame.f_code.co_filename).name in WAITS:
            self.check()

    def _find_crash(self) -> LoaderWorkerCrashed | None:
        for process in self._workers:
            if process.exitcode is not None:
                return LoaderWorkerCrashed(_crash_message(process.pid, process.exitcode))
        return None


def _crash_message(pid: int | None, code: int) -> str:
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    advice = "see its output above"
    if code == -signal.SIGKILL:
        advice = "use fewer --workers or a smaller --prefetch if the host ran out of memory"
    elif code == -getattr(signal, "SIGBUS", 0):
        advice = "use a larger /dev/shm (docker --shm-size) or a smaller --prefetch if /dev/shm is full"
    return f"loader worker {pid} ended with {how}: {advice}, or fetch without workers (--workers 0)"
