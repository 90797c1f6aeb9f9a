"""The child's side of a child process: it opens a workload, and answers calls on it."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from autobatch.core.options import Options
from autobatch.device.base import Device
from autobatch.footprint.tracing.apart import has_left_fakes
from autobatch.setup.child import ThisProcess, open_here
from autobatch.setup.setup import Role
from autobatch.setup.spare import Output
from autobatch.workload.contract import Workload
from autobatch.workload.user_code import to_picklable


def serve(
    connection: Connection, workload: Workload | str | None, options: Options, role: Role, log: Output
) -> None:
    """Run the child: open the workload, then answer calls until the pipe closes."""
    descriptor = log.descriptor
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Line buffers, because a crash loses buffered output.
    sys.stdout = sys.stderr = os.fdopen(os.dup(descriptor), "w", buffering=1, errors="replace")
    faulthandler.enable(descriptor)
    # The collections at the end of a process with torch take half a second.
    atexit.register(gc.freeze)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Trials start loader workers, which a daemon must not. They end with this process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        here = open_here(workload, options, role)
        # What is open now lives as long as this process, so no collection needs to look at it again.
        gc.collect()
        gc.freeze()
        connection.send((0, "answer", here.info, False))
    except (Exception, SystemExit) as error:
        connection.send((0, "error", to_picklable(error), False))
        return
    with suppress(EOFError, BrokenPipeError):
        while True:
            number, function, args, more = connection.recv()
            connection.send((number, *_answer(here, function, args, more), _must_end(here.setup.device)))


def _answer(
    here: ThisProcess, function: Callable[..., Any], args: tuple[Any, ...], more: dict[str, Any]
) -> tuple[str, Any]:
    try:
        return "answer", here.call("", function, *args, **more)
    except (Exception, SystemExit) as error:
        carried = to_picklable(error)
    # Outside the except block, nothing keeps the tensors of a failed call alive.
    here.setup.device.release()
    return "error", carried


def _must_end(device: Device) -> bool:
    """Return whether no later answer would be right.

    A GPU answers nothing any more after an error of its context. On a GPU a trace runs in this process, and
    code of the user's may have kept one of its fakes.
    """
    try:
        device.synchronize()
    except RuntimeError:
        return True
    return has_left_fakes()
