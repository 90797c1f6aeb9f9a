"""A child process that imports torch while its parent does, before either knows what to open.

This module imports torch in the child only, because the parent starts the child before its own import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import IO, Any

from autobatch.core.signals import end_with_parent, hold_back_signals

SERVE = "autobatch.probing.serve:serve"
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
class Spare:
    """A child that waits for the workload that it is to open."""

    process: BaseProcess
    connection: Connection
    log: Output
    is_taken: bool = False
    """True once a `autobatch.probing.child.ChildProcess` has it, and ends it."""

    def take(self) -> Spare:
        """Hand the child over."""
        self.is_taken = True
        return self


def start_spare() -> Spare:
    """Start a child that imports torch, then waits for a reference and settings."""
    context = multiprocessing.get_context("spawn")
    log = Output()
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait_and_serve, args=(theirs, log), daemon=True)
    with hold_back_signals({signal.SIGINT}):
        process.start()
    theirs.close()
    return Spare(process, ours, log)


@contextmanager
def spare_child() -> Iterator[Spare]:
    """Start a child, and end it at the end of the block if nobody has taken it."""
    spare = start_spare()
    try:
        yield spare
    finally:
        if not spare.is_taken:
            spare.connection.close()
            spare.process.kill()
            spare.process.join()
            spare.log.close()


def _wait_and_serve(connection: Connection, log: Output) -> None:
    """Run the child: import everything, wait for the workload, and serve it."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == parent.pid:  # unless a server of `multiprocessing` forked it
        end_with_parent()
    serve = resolve_name(SERVE)
    with suppress(EOFError, ConnectionResetError):
        reference, settings = connection.recv()
        serve(connection, reference, settings, log)
