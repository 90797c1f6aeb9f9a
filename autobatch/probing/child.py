"""The process in which a workload is tried: a child that may break without harm, or this one.

Whatever tries a workload (an attempt, a trial, a short run) is a function of a `Session`, that is, of an open
setup and of what earlier calls left there. `ChildProcess` calls such functions in one child, so that the
workload is opened once however many parts of a run try it. A child that is killed while the host runs out of
memory is an answer; a child that crashes or hangs is a clear error that quotes what it wrote.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast

from autobatch.core.errors import AutobatchError
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.setup import SetupInfo, SetupSettings, describe_setup, find_workload, open_setup
from autobatch.workload.contract import Workload
from autobatch.workload.user_code import to_picklable

ANSWER_SECONDS = 600.0
"""Time that one call may take before the child counts as hung."""
PATIENCE_SECONDS = 2.0
"""Time that a child that is no longer needed may take to leave."""
TAIL_LINES = 5
"""Lines of the child's output that a crash message quotes."""
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Files in which Linux counts OOM kills: of a container's control group (version 2), and of the machine."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Session:
    """An open setup, and objects that calls keep there for later calls."""

    setup: TrainSetup
    _kept: dict[type, Any] = field(default_factory=dict)

    def keep(self, value: T) -> T:
        """Keep a value in place of an earlier one of its type, and return it."""
        self._kept[type(value)] = value
        return value

    def find(self, kind: type[T]) -> T | None:
        """Return the kept value of a type; None if there is none."""
        return self._kept.get(kind)


class ChildCrashed(AutobatchError, RuntimeError):  # noqa: N818 - names what happened, as ProcessLookupError does
    """The child process crashed or hung; the message says how, and quotes what it wrote.

    Args:
        message: one line.
        out_of_memory: whether the host killed it for want of memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class SetupProcess(Protocol):
    """A process that holds an open setup and calls functions of it."""

    @property
    def info(self) -> SetupInfo:
        """Description of the setup."""

    def call(
        self, act: str, function: Callable[Concatenate[Session, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session there.

        Args:
            act: what the function does, for messages ("a trial").
            function: a function of a module; in a child, its arguments and its result are pickled.
            args: its arguments after the session.
            more: its keyword arguments.

        Raises:
            ChildCrashed: the child crashed, or gave no answer in time; `restart` starts another.
            AutobatchError: an error that the function raised; in a child, other errors become one of these.
        """

    def restart(self) -> None:
        """Replace a child that crashed by a new one."""


class ThisProcess:
    """A setup that is open in this process.

    Args:
        setup: the setup.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self.setup = setup
        self.info = describe_setup(setup)
        self._session = Session(setup)

    def call(
        self, act: str, function: Callable[Concatenate[Session, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session here; see `SetupProcess`."""
        del act
        return function(self._session, *args, **more)

    def restart(self) -> None:
        """Do nothing: there is no child."""


class ChildProcess:
    """A setup that is open in a child process.

    Args:
        reference: the workload as ``module:function`` or ``path.py:function``; None for the demo.
        settings: how the setup is opened.
        answer_seconds: time that one call may take.
        oom_kills: reads how many processes the host has killed for want of memory.
    """

    def __init__(
        self,
        reference: str | None,
        settings: SetupSettings,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        oom_kills: Callable[[], int] | None = None,
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._answer_seconds = answer_seconds
        self._oom_kills = oom_kills or count_oom_kills
        self._calls = 0
        self.info: SetupInfo

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Nobody waits for the end of a call after Ctrl-C.
        self.close(patience=PATIENCE_SECONDS if kind is None else 0.0)

    def close(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """End the child, and delete what it wrote."""
        self._stop(patience=patience)
        self._log.close()

    def call(
        self, act: str, function: Callable[Concatenate[Session, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the session in the child; see `SetupProcess`."""
        kills = self._oom_kills()
        self._calls += 1
        try:
            self._connection.send((self._calls, function, args, more))
            return cast(T, self._receive(act))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._stop()
            killed = code == -signal.SIGKILL and self._oom_kills() > kills
            raise ChildCrashed(self._crash_message(code, f"during {act}"), out_of_memory=killed) from None

    def restart(self) -> None:
        """Replace the child by a new one."""
        self.close(patience=0.0)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = tempfile.NamedTemporaryFile(prefix="autobatch-child-", suffix=".log")  # noqa: SIM115
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._reference, self._settings, self._log.name), daemon=True
        )
        with _hold_back_interrupts():
            self._process.start()
        theirs.close()
        self._calls = 0
        try:
            self.info = self._receive("opening the workload")
        except (EOFError, ConnectionResetError):
            message = self._crash_message(self._stop(), "while it opened the workload")
            raise AutobatchError(message) from None

    def _receive(self, act: str) -> Any:
        """Wait for the answer to the latest call. Ctrl-C ends the wait here, and the child ignores it."""
        deadline = time.monotonic() + self._answer_seconds
        while True:
            while not self._connection.poll(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    self._stop(patience=0.0)
                    raise ChildCrashed(
                        f"the child process gave no answer in {self._answer_seconds:.0f} s during {act} and "
                        f"was ended; it wrote: {self._tail()}"
                    )
            number, kind, content = self._connection.recv()
            if number != self._calls:
                continue  # of a call that was interrupted
            if kind == "error":
                raise content
            return content

    def _stop(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """End the child, which leaves when the pipe closes, and return its exit code."""
        with suppress(OSError):
            self._connection.close()
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode

    def _crash_message(self, code: int | None, when: str) -> str:
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        advice = ""
        if code == -signal.SIGKILL:
            advice = "; if the host ran out of memory, give a smaller --memory-budget or --max-micro-batch"
        return f"the child process ended {when} ({how}); it wrote: {self._tail()}{advice}"

    def _tail(self) -> str:
        """Return the last lines that the child wrote as one, or the place of a crash."""
        with suppress(OSError):
            lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
            crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
            if crash is None:
                return " | ".join(line.strip() for line in lines[-TAIL_LINES:]) or "nothing"
            frames = [line.strip() for line in lines[crash + 1 :] if line.startswith("  File ")]
            return " | ".join([lines[crash], *frames[:TAIL_LINES]])
        return "nothing"


@contextmanager
def open_process(
    workload: Workload | str | None, settings: SetupSettings, *, isolated: bool
) -> Iterator[SetupProcess]:
    """Open the workload in a child process, or here.

    Args:
        workload: the workload, or a reference to it; None for the demo.
        settings: how the setup is opened.
        isolated: open it in a child. Only a reference can be handed to one: a `Workload` is opened here.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    if isolated and not isinstance(workload, Workload):
        with ChildProcess(workload, settings) as child:
            yield child
        return
    yield ThisProcess(open_setup(find_workload(workload), settings, is_demo=workload is None))


def serve(connection: Connection, reference: str | None, settings: SetupSettings, log: str) -> None:
    """Run the child: open the workload, then answer one call after the other until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Line by line: what was written before a crash must not be lost in a buffer.
    sys.stdout = sys.stderr = os.fdopen(os.dup(descriptor), "w", buffering=1, errors="replace")
    faulthandler.enable(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Trials start loader workers, which a daemon may not. They end with this process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        session = Session(open_setup(find_workload(reference), settings, is_demo=reference is None))
        connection.send((0, "answer", describe_setup(session.setup)))
    except (Exception, SystemExit) as error:
        connection.send((0, "error", to_picklable(error)))
        return
    with suppress(EOFError, BrokenPipeError):
        while True:
            number, function, args, more = connection.recv()
            connection.send((number, *_answer(session, function, args, more)))


def _answer(
    session: Session, function: Callable[..., Any], args: tuple[Any, ...], more: dict[str, Any]
) -> tuple[str, Any]:
    try:
        return "answer", function(session, *args, **more)
    except (Exception, SystemExit) as error:
        carried = to_picklable(error)
    # The except block is left: nothing keeps the tensors of a failed call alive any more.
    session.setup.device.release()
    return "error", carried


@contextmanager
def _hold_back_interrupts() -> Iterator[None]:
    """Hold back SIGINT within the block. A process that is started there never sees one."""
    # Started here, for it lifts the block when it starts by itself.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def count_oom_kills(files: Sequence[Path] = OOM_COUNTERS) -> int:
    """Count the processes that were killed for want of memory, in this control group and on this machine.

    Args:
        files: files of lines with a name and a count, ``oom_kill`` among them; absent files count nothing.
    """
    kills = 0
    for file in files:
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    kills += int(value)
    return kills
