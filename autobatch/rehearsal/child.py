"""The isolated child: a process of its own that opens a workload, and whose crash does no harm.

It has one verb: `ChildProcess.call` calls a function of the open setup there, so that the workload is opened
once for all stages of a run. A child that is killed while the host runs out of memory is an answer. A child
that crashes or hangs is an error that quotes the child's output.

A child may start before its parent imports torch, and imports it meanwhile. So this module imports no torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from autobatch.core.errors import AutobatchError
from autobatch.core.options import Options
from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import count_oom_kills, has_gpu_driver

if TYPE_CHECKING:
    from autobatch.rehearsal.setup import Role, SetupInfo

PATIENCE_SECONDS = 2.0
"""Time for a child to leave before it is killed."""
TAIL_LINES = 5
"""Lines of the child's output in a crash message."""
SERVE = "autobatch.rehearsal.session:serve"
"""What the child runs, by its name: an import would bring torch into the parent."""
WARM_UP = "autobatch.step.optimizers:import_for_optimizers"
"""What the child calls before it has a workload, by its name."""

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
    """Time after which a call counts as hung."""

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
        self._opened = reference, options, role
        with suppress(BrokenPipeError, ConnectionResetError):  # the wait for its answer tells why
            self._connection.send(self._opened)
        self._calls = 0
        self._is_lost = False
        try:
            self.info = self._receive("opening the workload")
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
            ChildCrashed: the child crashed, or gave no answer in time.
            AutobatchError: the function raised it, or another error that became a `UserCodeError`.
        """
        if self._is_lost:
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
        self._process: BaseProcess = context.Process(target=_wait_and_serve, args=args, daemon=True)
        with hold_back_signals({signal.SIGINT}, with_tracker=not self._is_copy), warnings.catch_warnings():
            # Python warns of threads, such as those of the terminal, which a copy does not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        output.close()
        self._is_started, self._is_copy = True, False

    def _receive(self, act: str) -> Any:
        """Wait for the answer to the latest call. Ctrl-C ends the wait, and the child ignores it."""
        deadline = time.monotonic() + self.answer_seconds
        while self._connection.poll(max(0.0, deadline - time.monotonic())):
            number, kind, content, self._is_lost = self._connection.recv()
            if number != self._calls:
                continue  # the answer to an interrupted call
            if kind == "error":
                raise content
            return content
        self._stop(patience=0.0)
        raise ChildCrashed(
            f"the child process gave no answer in {self.answer_seconds:.0f} s during {act} and was ended. "
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


def _wait_and_serve(connection: Connection, of_parent: Connection | None, output: Connection) -> None:
    """Run the child: import everything, wait for the workload, and serve it.

    Args:
        connection: the child's end of the pipe.
        of_parent: in a copy, the parent's end of the pipe, which else would never close.
        output: has the descriptor of the file for the child's output.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == parent.pid:  # unless a server of `multiprocessing` forked it
        end_with_parent()
    if of_parent is not None:
        of_parent.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.disable()  # as in the parent, see `autobatch.cli.main`
    serve = resolve_name(SERVE)
    resolve_name(WARM_UP)()
    gc.freeze()
    gc.enable()
    with suppress(EOFError, ConnectionResetError):
        reference, options, role = connection.recv()
        serve(connection, reference, options, role, output.fileno())
