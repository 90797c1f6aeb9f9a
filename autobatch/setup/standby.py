"""A child process that waits for the workload that it is to open.

It imports torch while its parent does. A copy of the parent needs no import of its own, which saves a second
of the processor. This module imports torch in the child only, because the parent may start the child before
its own import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import IO, Any

from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import has_gpu_driver

SERVE = "autobatch.setup.child:serve"
"""What the child runs, by its name: an import would bring torch into the parent."""


class Output:
    """File for the output of a child.

    It has no name, so that the system removes it with the last process that has it open, even a killed one.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = tempfile.TemporaryFile() if file is None else file  # noqa: SIM115

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file."""
        return self._file.fileno()

    def __reduce__(self) -> tuple[Callable[[Any], Output], tuple[Any]]:
        """Hand the open file to a process that starts, as `multiprocessing` hands over the end of a pipe."""
        return _open_in_child, (reduction.DupFd(self.descriptor),)

    def read(self) -> str:
        """Return all that was written."""
        # Not from the place where the child writes, which the processes share.
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the file here."""
        self._file.close()


def _open_in_child(handed: Any) -> Output:
    return Output(os.fdopen(handed.detach(), "wb", buffering=0))


@dataclass
class Standby:
    """A child that waits for the workload that it is to open."""

    process: BaseProcess
    connection: Connection
    log: Output
    is_taken: bool = False
    """True once a `autobatch.setup.child.ChildProcess` has it, and ends it."""

    def take(self) -> Standby:
        """Hand the child over."""
        self.is_taken = True
        return self


def may_copy(device: str) -> bool:
    """Return whether a process that has only imported torch may be copied into a child.

    Elsewhere than on Linux, system libraries do not survive a copy. A child that may use a GPU starts afresh,
    because a driver that any library has started before a copy does not work in it.

    Args:
        device: the device of the run as it was asked for.
    """
    has_gpu = device.startswith("cuda") or (device == "auto" and has_gpu_driver())
    return sys.platform == "linux" and not has_gpu


def start_standby(*, is_copy: bool = False) -> Standby:
    """Start a child that waits for a reference and options.

    Args:
        is_copy: copy this process, which has imported torch and done nothing with it; see `may_copy`.
    """
    return start_child(_wait_and_serve, is_copy=is_copy)


def start_child(serve: Callable[..., None], *more: Any, is_copy: bool) -> Standby:
    """Start a child.

    Args:
        serve: runs in the child, with its end of the pipe, in a copy that of its parent, its output and more.
        more: arguments for it.
        is_copy: copy this process.
    """
    context: Any = multiprocessing.get_context("fork" if is_copy else "spawn")
    log = Output()
    ours, theirs = context.Pipe()
    args = (theirs, ours if is_copy else None, log, *more)
    process = context.Process(target=serve, args=args, daemon=True)
    with hold_back_signals({signal.SIGINT}, with_tracker=not is_copy), warnings.catch_warnings():
        # Python warns of threads, such as those of the terminal, which a copy does not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return Standby(process, ours, log)


def leave_parent(of_parent: Connection | None) -> None:
    """Separate a child that has just started from its parent, and end it with its parent.

    Args:
        of_parent: in a copy, the parent's end of the pipe, which else would never close.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == parent.pid:  # unless a server of `multiprocessing` forked it
        end_with_parent()
    if of_parent is not None:
        of_parent.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def standby_child(*, is_copy: bool = False) -> Iterator[Standby]:
    """Start a child, and end it at the end of the block if nobody has taken it; see `start_standby`."""
    standby = start_standby(is_copy=is_copy)
    try:
        yield standby
    finally:
        if not standby.is_taken:
            standby.connection.close()
            standby.process.kill()
            standby.process.join()
            standby.log.close()


def _wait_and_serve(connection: Connection, of_parent: Connection | None, log: Output) -> None:
    """Run the child: import everything, wait for the workload, and serve it."""
    leave_parent(of_parent)
    serve = resolve_name(SERVE)
    with suppress(EOFError, ConnectionResetError):
        reference, options, role = connection.recv()
        serve(connection, reference, options, role, log)
