"""The process that holds the setup of real steps: this one, or a child whose crash does no harm.

    parent                                        child
    call(act, function, …) ──the function──►      function(session, …)
                           ◄──"alive"───────      at each phase of a step
                           ◄──the answer────

Both kinds have one verb, `call`: a stage of a run does not know where it runs, and the workload is opened
once for all stages. A child that the host kills for want of memory is an answer. A child that crashes, or
gives no sign of life for long, is an error that quotes its last output.

A child may start before its parent imports torch, and imports it meanwhile. So this module imports torch in
functions only.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from autobatch.core.errors import AutobatchError
from autobatch.core.options import Options
from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import count_oom_kills, has_gpu_driver

if TYPE_CHECKING:
    from autobatch.rehearsal.setup import Role, Setup, SetupInfo
    from autobatch.workload.reference import WorkloadSource

PATIENCE_SECONDS = 2.0
"""Time for a child to leave before it is killed."""
SIGN_SECONDS = 10.0
"""Least time between two signs of life of a child."""
TAIL_LINES = 5
"""Lines of the child's output in a crash message."""

P = ParamSpec("P")
T = TypeVar("T")


class ChildCrashed(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """Crash or hang of the child process.

    Args:
        message: one line, with the last output of the child.
        out_of_memory: the host killed the child because it ran out of memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


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
        from autobatch.rehearsal.setup import describe_setup

        self.setup = setup
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
    """A child process, which starts with the block and ends with it.

    Args:
        is_copy: copy this process, which has imported torch and done nothing with it; see `may_copy`.
        oom_kills: counts the processes that the host has killed because it ran out of memory.
    """

    info: SetupInfo
    """Description of the setup that is open."""
    is_replaceable = True
    """True: a new child takes the place of one that crashed, or lost its GPU context."""
    answer_seconds = 600.0
    """Time without an answer and without a sign of life after which a call counts as hung."""

    def __init__(self, *, is_copy: bool = False, oom_kills: Callable[[], int] = count_oom_kills) -> None:
        self._is_copy = is_copy
        self._oom_kills = oom_kills
        self._is_started = False
        self._opened: tuple[str | None, Options, Role] | None = None

    def __enter__(self) -> Self:
        if not self._is_started:
            self._start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After Ctrl-C the user does not wait for the end of a call.
        self.close(patience=PATIENCE_SECONDS if kind is None and self._opened else 0.0)

    def open(self, reference: str | None, options: Options, role: Role) -> Self:
        """Open a workload in the child, which has not opened any.

        Args:
            reference: the workload as ``module:function`` or ``path.py:function``; None for the demo.
            options: options of the run.
            role: part of this process among the ranks.

        Raises:
            InputError: the device, the budget, the workload or a setting is invalid.
            AutobatchError: the child crashed.
        """
        self._opened, self._calls = (reference, options, role), 0
        try:
            with suppress(BrokenPipeError):  # the wait for its answer tells why
                self._connection.send(self._opened)
            # Without a limit: the user's code may download a dataset, or build a large model.
            self.info = self._receive("opening the workload", math.inf)
        except (EOFError, ConnectionResetError):
            message = self._crash_message(self._stop(), "while it opened the workload")
            raise AutobatchError(message) from None
        return self

    def call(
        self, act: str, function: Callable[Concatenate[Any, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session in the child; in a new child if this one crashed, or lost its GPU.

        Args:
            act: the action of the function in messages, for example "a trial".
            function: a function of a module; its arguments and its result are pickled.
            args: its arguments after the session.
            more: its keyword arguments.

        Raises:
            ChildCrashed: the child crashed, or gave no sign of life for long.
            AutobatchError: the function raised it, or another error that became a `UserCodeError`.
        """
        if self._is_lost:
            self.restart()
        kills = self._oom_kills()
        self._calls += 1
        try:
            self._connection.send((self._calls, function, args, more))
            return cast(T, self._receive(act, self.answer_seconds))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._stop()
        killed = code == -signal.SIGKILL and self._oom_kills() > kills
        raise ChildCrashed(self._crash_message(code, f"during {act}"), out_of_memory=killed)

    def restart(self) -> None:
        """Open the workload in a new child, in place of this one."""
        assert self._opened is not None
        self.close(patience=0.0)
        self._start()
        self.open(*self._opened)

    def close(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """End the child, and delete its output."""
        if self._is_started:
            self._stop(patience=patience)
            self._log.close()
            self._is_started = False

    def _start(self) -> None:
        """Start a process that waits for a workload; later ones are no copies."""
        context: Any = multiprocessing.get_context("fork" if self._is_copy else "spawn")
        # A file without a name goes with the last process that has it open, even a killed one.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, theirs = context.Pipe()
        # `multiprocessing` hands over an open file only as the end of a pipe.
        output = Connection(os.dup(self._log.fileno()))
        args = theirs, self._connection if self._is_copy else None, output
        self._process: BaseProcess = context.Process(target=_serve, args=args, daemon=True)
        with hold_back_signals({signal.SIGINT}, with_tracker=not self._is_copy), warnings.catch_warnings():
            # Python warns of threads, such as those of the terminal, which a copy does not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        output.close()
        self._is_started, self._is_copy, self._is_lost = True, False, False

    def _receive(self, act: str, seconds: float) -> Any:
        """Wait for the answer to the latest call. Ctrl-C ends the wait, and the child ignores it.

        Args:
            act: the action of the call.
            seconds: time without a sign of life after which the call counts as hung.
        """
        deadline = time.monotonic() + seconds
        while self._connection.poll(None if deadline == math.inf else max(0.0, deadline - time.monotonic())):
            number, kind, content, is_lost = self._connection.recv()
            if number != self._calls:
                continue  # the answer to an interrupted call
            if kind == "alive":
                deadline = time.monotonic() + seconds
                continue
            self._is_lost = is_lost
            if kind == "error":
                raise content
            return content
        self._stop(patience=0.0)
        raise ChildCrashed(
            f"the child process gave no answer in {seconds:.0f} s during {act} and was ended. "
            f"Its last output: {self._tail()}"
        )

    def _stop(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """Close the pipe, wait for the child to leave or kill it, and return its exit code."""
        self._is_lost = True
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
        # Not from the place where the child writes, which the processes share.
        descriptor = self._log.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        lines = text.strip().splitlines()
        crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        if crash is None:
            return " | ".join(line.strip() for line in lines[-TAIL_LINES:]) or "nothing"
        frames = [line.strip() for line in lines[crash + 1 :] if line.startswith("  File ")]
        return " | ".join([lines[crash], *frames[:TAIL_LINES]])


SetupProcess = ThisProcess | ChildProcess
"""A process that holds an open setup, and calls functions there."""


@contextmanager
def open_process(
    workload: WorkloadSource,
    options: Options,
    role: Role,
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
        yield ThisProcess(_open(workload, options, role))


def may_copy(device: str) -> bool:
    """Return whether a process that has only imported torch may be copied into a child.

    A copy needs no import of its own, which saves 2.5 s of the processor. Elsewhere than on Linux, system
    libraries do not survive a copy. A child that may use a GPU starts afresh, because a driver that any
    library has started before a copy does not work in it.

    Args:
        device: the device of the run as it was asked for.
    """
    has_gpu = device.startswith("cuda") or (device == "auto" and has_gpu_driver())
    return sys.platform == "linux" and not has_gpu


def _open(workload: WorkloadSource, options: Options, role: Role) -> Setup:
    from autobatch.rehearsal.setup import open_setup
    from autobatch.workload.reference import find_workload

    return open_setup(find_workload(workload, options.device.seed), options, role, is_demo=workload is None)


def _serve(connection: Connection, of_parent: Connection | None, output: Connection) -> None:
    """Run the child: import torch, open the workload that comes, then answer calls until the pipe closes.

    Args:
        connection: the child's end of the pipe.
        of_parent: in a copy, the parent's end of the pipe, which else would never close.
        output: has the descriptor of the file for the child's output.
    """
    _begin(of_parent, output.fileno())
    from autobatch.workload.user_code import to_picklable

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        workload, options, role = connection.recv()
        number, next_sign = 0, 0.0

        def show_life() -> None:
            nonlocal next_sign
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + SIGN_SECONDS
                connection.send((number, "alive", None, False))

        try:
            setup = replace(_open(workload, options, role), show_life=show_life)
            here = ThisProcess(setup)
        except (Exception, SystemExit) as error:
            connection.send((0, "error", to_picklable(error), False))
            return
        # What is open now lives as long as this process, so no collection needs to look at it again.
        gc.collect()
        gc.freeze()
        connection.send((0, "answer", here.info, False))
        while True:
            number, function, args, more = connection.recv()
            kind = "answer"
            try:
                content = here.call("", function, *args, **more)
            except (Exception, SystemExit) as error:
                kind, content = "error", to_picklable(error)
            if kind == "error":  # outside of the except block, nothing keeps the tensors of a failed call
                setup.device.release()
            connection.send((number, kind, content, _has_lost_context(setup)))


def _begin(of_parent: Connection | None, output: int) -> None:
    """Detach the child from the parent's terminal and signals, and import what it needs."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == parent.pid:  # unless a server of `multiprocessing` forked it
        end_with_parent()
    if of_parent is not None:
        of_parent.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # as in the parent, see `autobatch.cli.main`
    from autobatch.step.optimizers import import_for_optimizers

    import_for_optimizers()
    gc.freeze()
    gc.enable()
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Line buffers, because a crash loses buffered output.
    sys.stdout = sys.stderr = os.fdopen(os.dup(output), "w", buffering=1, errors="replace")
    faulthandler.enable(output)
    # The collections at the end of a process with torch take half a second.
    atexit.register(gc.freeze)
    # Trials start loader workers, which a daemon must not. They end with this process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _has_lost_context(setup: Setup) -> bool:
    """Return whether the GPU answers nothing any more, as after an error of its context."""
    try:
        setup.device.synchronize()
    except RuntimeError:
        return True
    return False
