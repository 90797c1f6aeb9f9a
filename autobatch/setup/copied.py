"""A child process that is a copy of this one, for a workload that no other process could build.

A library call has the workload as an object, which may hold functions that no pickle carries. A copy has it
without one. It can try a batch over all ranks, and be thrown away if that fails.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from autobatch.core.errors import AutobatchError
from autobatch.footprint.tracing.apart import can_run_apart
from autobatch.setup.serve import serve
from autobatch.setup.spare import Output, Spare, leave_parent, start_child
from autobatch.workload.contract import Workload

NO_COPY = "this process cannot be copied, because"


class CannotCopyError(AutobatchError, RuntimeError):
    """A copy of this process cannot train."""


def why_not_copied() -> str | None:
    """Return why this process cannot be copied; None if it can."""
    if can_run_apart():
        return None
    if multiprocessing.current_process().daemon:
        return f"{NO_COPY} it is a daemon of multiprocessing"
    return f"{NO_COPY} it uses a GPU already" if sys.platform == "linux" else f"{NO_COPY} only Linux does so"


def start_copy(workload: Workload | str | None) -> Spare:
    """Start a copy of this process, which waits for settings and then serves the workload."""
    return start_child(_wait_and_serve, workload, is_copy=True)


def _wait_and_serve(
    connection: Connection, of_parent: Connection, log: Output, workload: Workload | str | None
) -> None:
    """Run the copy: wait for settings, serve the workload, and end without the clean-up of its parent."""
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.meeting import forget_group

    try:
        leave_parent(of_parent)
        # The threads of OpenMP do not exist here.
        torch.set_num_threads(1)
        # Held until the process has ended, without any destructor.
        _kept = forget_group()
        with suppress(EOFError, ConnectionResetError):
            _, settings = connection.recv()
            if _can_train(connection):
                serve(connection, workload, settings, log)
    finally:
        os._exit(0)


def _can_train(connection: Connection) -> bool:
    """Check that autograd runs here, and tell the parent if it does not."""
    try:
        # A CUDA build of torch refuses autograd in a copy if it ran before it.
        torch.ones((), requires_grad=True, device="cpu").backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = f"{NO_COPY} it has trained before: {str(error).splitlines()[0]}"
        connection.send((0, "error", CannotCopyError(reason), False))
        return False
    return True
