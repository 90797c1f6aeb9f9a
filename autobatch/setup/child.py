"""The process that tries a workload: a child, whose crash does no harm, or this one.

An attempt, a trial or a short run is a function of a `Session`: an open setup and the results of earlier
calls. `ChildProcess` calls such functions in one child, so that the workload is opened once for all stages of
a run. A child that is killed while the host runs out of memory is an answer. A child that crashes or hangs is
an error that quotes the child's output.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from autobatch.core.errors import AutobatchError
from autobatch.core.options import Options
from autobatch.device.base import Device
from autobatch.device.host import count_oom_kills
from autobatch.footprint.tracing.apart import has_left_fakes
from autobatch.setup.setup import Role, Setup, SetupInfo, describe_setup, open_setup
from autobatch.setup.standby import Output, Standby, start_standby
from autobatch.workload.contract import Workload
from autobatch.workload.reference import find_workload
from autobatch.workload.user_code import to_picklable

ANSWER_SECONDS = 600.0
"""Time after which a call counts as hung."""
PATIENCE_SECONDS = 2.0
"""Time for a child to leave before it is killed."""
TAIL_LINES = 5
"""Lines of the child's output in a crash message."""

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


class ChildCrashed(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """Crash or hang of the child process.

    Args:
        message: one line, with the last output of the child.
        out_of_memory: the host killed the child because it ran out of memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class ThisProcess:
    """A setup that is open in this process.

    Args:
        setup: the setup.
        reason: why there is no child, in words.
    """

    is_replaceable = False
    """False: there is no child."""

    def __init__(self, setup: Setup, reason: str = "the workload is open in this process") -> None:
        self.setup = setup
        self.reason = reason
        self.info: SetupInfo = describe_setup(setup)
        self._session = Session(setup)

    def call(
        self, act: str, function: Callable[Concatenate[Session, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session here; see `ChildProcess.call`."""
        del act
        return function(self._session, *args, **more)

    def restart(self) -> None:
        """Do nothing: there is no child."""


class ChildProcess:
    """A setup that is open in a child process.

    Args:
        reference: the workload as ``module:function`` or ``path.py:function``; None for the demo.
        options: options of the run.
        role: part of this process among the ranks.
        standby: a child that has begun to import torch; None to start one.
        start: starts further children.
        answer_seconds: time after which a call counts as hung.
        oom_kills: counts the processes that the host has killed because it ran out of memory.
    """

    info: SetupInfo
    """Description of the setup."""
    is_replaceable = True
    """True: `restart` replaces a child that crashed, or lost its GPU context."""
    reason = ""

    def __init__(
        self,
        reference: str | None,
        options: Options,
        role: Role = Role(),  # noqa: B008 - plain values
        *,
        standby: Standby | None = None,
        start: Callable[[], Standby] = start_standby,
        answer_seconds: float = ANSWER_SECONDS,
        oom_kills: Callable[[], int] = count_oom_kills,
    ) -> None:
        self._reference = reference
        self._options = options
        self._role = role
        self._standby = standby
        self._start_child = start
        self._answer_seconds = answer_seconds
        self._oom_kills = oom_kills
        self._calls = 0
        self._has_lost_gpu = False

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After Ctrl-C the user does not wait for the end of a call.
        self.close(patience=PATIENCE_SECONDS if kind is None else 0.0)

    def close(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """End the child, and delete its output."""
        self._stop(patience=patience)
        self._log.close()

    def call(
        self, act: str, function: Callable[Concatenate[Session, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session in the child; in a new child if the GPU of this one is lost.

        Args:
            act: the action of the function in messages, for example "a trial".
            function: a function of a module; its arguments and its result are pickled.
            args: its arguments after the session.
            more: its keyword arguments.

        Raises:
            ChildCrashed: the child crashed, or gave no answer in time; `restart` starts another.
            AutobatchError: the function raised it, or another error that became a `UserCodeError`.
        """
        if self._has_lost_gpu:
            self.restart()
        kills = self._oom_kills()
        self._calls += 1
        try:
            self._connection.send((self._calls, function, args, more))
            return cast(T, self._receive(act))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._stop()
            killed = code == -signal.SIGKILL and self._oom_kills() > kills
            message = self._crash_message(code, f"during {act}")
            raise ChildCrashed(message, out_of_memory=killed) from None

    def restart(self) -> None:
        """Start a new child in place of one that crashed."""
        self.close(patience=0.0)
        self._start()

    def _start(self) -> None:
        standby = self._start_child() if self._standby is None or self._standby.is_taken else self._standby
        self._log, self._connection, self._process = standby.log, standby.connection, standby.take().process
        with suppress(BrokenPipeError, ConnectionResetError):  # the wait for its answer tells why
            self._connection.send((self._reference, self._options, self._role))
        self._calls = 0
        self._has_lost_gpu = False
        try:
            self.info = self._receive("opening the workload")
        except (EOFError, ConnectionResetError):
            message = self._crash_message(self._stop(), "while it opened the workload")
            raise AutobatchError(message) from None

    def _receive(self, act: str) -> Any:
        """Wait for the answer to the latest call. Ctrl-C ends the wait, and the child ignores it."""
        deadline = time.monotonic() + self._answer_seconds
        while self._connection.poll(max(0.0, deadline - time.monotonic())):
            number, kind, content, self._has_lost_gpu = self._connection.recv()
            if number != self._calls:
                continue  # the answer to an interrupted call
            if kind == "error":
                raise content
            return content
        self._stop(patience=0.0)
        raise ChildCrashed(
            f"the child process gave no answer in {self._answer_seconds:.0f} s during {act} and was ended. "
            f"Its last output: {self._tail()}"
        )

    def _stop(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """Close the pipe, wait for the child to leave or kill it, and return its exit code."""
        with suppress(OSError):
            self._connection.close()
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode

    def _crash_message(self, code: int | None, when: str) -> str:
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        advice = ". If the host ran out of memory, give a smaller --memory-budget or --max-micro-batch"
        return (
            f"the child process ended {when} ({how}). Its last output: {self._tail()}"
            f"{advice if code == -signal.SIGKILL else ''}"
        )

    def _tail(self) -> str:
        """Return the last lines of the child's output in one line, or the place of a crash."""
        lines = self._log.read().strip().splitlines()
        crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        if crash is None:
            return " | ".join(line.strip() for line in lines[-TAIL_LINES:]) or "nothing"
        frames = [line.strip() for line in lines[crash + 1 :] if line.startswith("  File ")]
        return " | ".join([lines[crash], *frames[:TAIL_LINES]])


SetupProcess = ThisProcess | ChildProcess
"""A process that holds an open setup, and calls functions there."""


@contextmanager
def open_process(
    workload: Workload | str | None,
    options: Options,
    role: Role = Role(),  # noqa: B008 - plain values
    *,
    isolated: bool,
    standby: Standby | None = None,
) -> Iterator[SetupProcess]:
    """Open the workload in a child process, or here.

    Args:
        workload: the workload, or a reference to it; None for the demo.
        options: options of the run.
        role: part of this process among the ranks.
        isolated: open a reference in a child.
        standby: a child that has begun to import torch; None to start one.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    if isolated and not isinstance(workload, Workload):
        with ChildProcess(
            workload, options, role, standby=None if standby is None or standby.is_taken else standby
        ) as child:
            yield child
        return
    yield open_here(workload, options, role)


def open_here(
    workload: Workload | str | None,
    options: Options,
    role: Role = Role(),  # noqa: B008 - plain values
) -> ThisProcess:
    """Open the workload in this process."""
    made = find_workload(workload, options.device.seed)
    return ThisProcess(open_setup(made, options, role, is_demo=workload is None))


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
