"""A session: an open setup in a child process or in this one, and the functions that are called there.

An attempt, a trial or a short run is a function of a `Session`. The caller does not know where it runs.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from autobatch.core.options import Options
from autobatch.device.base import Device
from autobatch.footprint.tracing.apart import has_left_fakes
from autobatch.rehearsal.child import ChildProcess
from autobatch.rehearsal.setup import Role, Setup, SetupInfo, describe_setup, open_setup
from autobatch.workload.reference import WorkloadSource, find_workload
from autobatch.workload.user_code import to_picklable

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Session:
    """An open setup, and objects that calls keep there for later calls."""

    setup: Setup
    _kept: dict[type, Any] = field(default_factory=dict)

    def keep(self, value: T) -> T:
        """Keep a value in place of an earlier one of its type, and return it."""
        self._kept[type(value)] = value
        return value

    def find(self, kind: type[T]) -> T | None:
        """Return the kept value of a type; None if there is none."""
        return self._kept.get(kind)


class ThisProcess:
    """A setup that is open in this process."""

    is_replaceable = False
    """False: there is no child."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.info: SetupInfo = describe_setup(setup)
        self._session = Session(setup)

    def call(
        self, act: str, function: Callable[Concatenate[Session, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session here; see `autobatch.rehearsal.child.ChildProcess.call`."""
        del act
        return function(self._session, *args, **more)

    def restart(self) -> None:
        """Do nothing: there is no child."""


SetupProcess = ThisProcess | ChildProcess
"""A process that holds an open setup, and calls functions there."""


@contextmanager
def open_process(
    workload: WorkloadSource,
    options: Options,
    role: Role = Role(),  # noqa: B008 - plain values
    *,
    isolated: bool,
    child: ChildProcess | None = None,
) -> Iterator[SetupProcess]:
    """Open the workload in a child process, or here.

    Args:
        workload: the workload, or a reference to it; None for the demo.
        options: options of the run.
        role: part of this process among the ranks.
        isolated: open a reference in a child.
        child: a child that has begun to import torch; None to start one.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    if isolated and (workload is None or isinstance(workload, str)):
        with child or ChildProcess() as process:
            yield process.open(workload, options, role)
    else:
        yield _open_here(workload, options, role)


def serve(
    connection: Connection, workload: str | None, options: Options, role: Role, output_descriptor: int
) -> None:
    """Run the child: open the workload, then answer calls until the pipe closes."""
    os.dup2(output_descriptor, 1)
    os.dup2(output_descriptor, 2)
    # Line buffers, because a crash loses buffered output.
    sys.stdout = sys.stderr = os.fdopen(os.dup(output_descriptor), "w", buffering=1, errors="replace")
    faulthandler.enable(output_descriptor)
    # The collections at the end of a process with torch take half a second.
    atexit.register(gc.freeze)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Trials start loader workers, which a daemon must not. They end with this process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        here = _open_here(workload, options, role)
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


def _open_here(workload: WorkloadSource, options: Options, role: Role) -> ThisProcess:
    made = find_workload(workload, options.device.seed)
    return ThisProcess(open_setup(made, options, role, is_demo=workload is None))


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
