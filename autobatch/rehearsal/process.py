"""The process that holds the setup of real steps: this one, or a child whose crash does no harm.

    parent                                        child
    call(act, function, …) ──the function──►      function(setup, …)
                           ◄──the answer────

A stage of a run does not know where it runs, and the workload is opened once for all stages. A child that the
host kills for want of memory is an answer. A child that crashes is an error that quotes its last output.

A child may start before its parent imports torch, and imports it meanwhile. So this module imports torch in
functions only.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from autobatch.core.errors import AutobatchError
from autobatch.core.options import Options
from autobatch.core.signals import end_with_parent, start_quietly
from autobatch.device.host import count_oom_kills, has_gpu_driver

if TYPE_CHECKING:
    from autobatch.rehearsal.setup import Setup, SetupInfo
    from autobatch.workload.user_code import WorkloadSource

PATIENCE_SECONDS = 2.0
"""Time for a child to leave before it is killed."""
TAIL_LINES = 5
"""Lines of the child's output in a crash message."""
ENDED = (EOFError, BrokenPipeError, ConnectionResetError)
"""Errors of a pipe whose other end is gone."""

P = ParamSpec("P")
T = TypeVar("T")


class ChildCrashed(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """Crash of the child process.

    Args:
        message: one line, with the last output of the child.
        out_of_memory: the host killed the child because it ran out of memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class ThisProcess:
    """A setup that is open in this process."""

    def __init__(self, setup: Setup) -> None:
        from autobatch.rehearsal.setup import describe_setup

        self.setup = setup
        self.info: SetupInfo = describe_setup(setup)

    def call(
        self, act: str, function: Callable[Concatenate[Setup, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the setup here; see `ChildProcess.call`."""
        del act
        return function(self.setup, *args, **more)


class ChildProcess:
    """A child process, which starts with the block and ends with it.

    Args:
        is_copy: copy this process, which has imported torch and done nothing with it; see `may_copy`.
    """

    info: SetupInfo
    """Description of the setup that is open."""

    def __init__(self, *, is_copy: bool = False) -> None:
        self._is_copy = is_copy
        self._process: Any = None
        self._opened: tuple[str | None, Options, int] | None = None
        self._is_lost = False
        """True if another child must answer the next call."""

    def __enter__(self) -> Self:
        if self._process is not None:
            return self
        context: Any = multiprocessing.get_context("fork" if self._is_copy else "spawn")
        # A file without a name goes with the last process that has it open, even a killed one.
        self._log = tempfile.TemporaryFile()
        self._connection, theirs = context.Pipe()
        # `multiprocessing` hands over an open file only as the end of a pipe.
        output = Connection(os.dup(self._log.fileno()))
        args = theirs, self._connection if self._is_copy else None, output
        self._process = context.Process(target=_serve, args=args, daemon=True)
        start_quietly(self._process, is_copy=self._is_copy)
        theirs.close()
        output.close()
        self._is_copy = False  # later ones are none
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._process is not None:  # an outer block may follow an inner one
            # After Ctrl-C the user does not wait for the end of a call.
            self._stop(PATIENCE_SECONDS if kind is None and self._opened else 0.0)
            self._log.close()
            self._process = None

    def open(self, reference: str | None, options: Options, world: int) -> Self:
        """Open a workload in the child, which has not opened any; None for the demo.

        Raises:
            InputError: the device, the budget, the workload or a setting is invalid.
            ChildCrashed: the child crashed.
        """
        self._opened = reference, options, world
        self.info = self._answer("while it opened the workload", _open, self._opened)
        return self

    def call(
        self, act: str, function: Callable[Concatenate[Setup, P], T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Call a function of the setup in the child; in a new child if this one crashed, or lost its GPU.

        The function is one of a module, and all is pickled. Messages name the act, for example "a trial".

        Raises:
            ChildCrashed: the child crashed.
            AutobatchError: the function raised it, or another error that became a `UserCodeError`.
        """
        if self._is_lost and self._opened is not None:
            self.__exit__(ChildCrashed)
            self.__enter__().open(*self._opened)
        return cast(T, self._answer(f"during {act}", function, args, more))

    def _answer(self, when: str, function: object, args: object, more: object = None) -> Any:
        """Have a function called, and wait for its answer. Ctrl-C ends the wait, and the child ignores it."""
        kills = count_oom_kills()
        self._is_lost = True  # until it has answered
        try:
            with suppress(BrokenPipeError):  # the wait tells why
                self._connection.send((function, args, more))
            is_error, content, self._is_lost = self._connection.recv()
        except ENDED:
            code = self._stop(PATIENCE_SECONDS)
        else:
            if is_error:
                raise content
            return content
        is_killed = code == -signal.SIGKILL
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        advice = ". If the host ran out of memory, give a smaller --memory-budget or --max-micro-batch"
        raise ChildCrashed(
            f"the child process ended {when} ({how}). Its last output: {_last_lines(self._log)}"
            f"{advice if is_killed else ''}",
            out_of_memory=is_killed and count_oom_kills() > kills,
        )

    def _stop(self, patience: float) -> int:
        """Close the pipe, wait for the child to leave or kill it, and return its exit code."""
        self._connection.close()
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return int(self._process.exitcode)


SetupProcess = ThisProcess | ChildProcess
"""A process that holds an open setup, and calls functions there."""


@contextmanager
def open_process(
    workload: WorkloadSource, options: Options, world: int, child: ChildProcess | None = None
) -> Iterator[SetupProcess]:
    """Open the workload here; a reference, or the demo, in a child process if there is one.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    if child is not None and (workload is None or isinstance(workload, str)):
        with child as process:
            yield process.open(workload, options, world)
    else:
        yield ThisProcess(_open(workload, options, world))


def may_copy(device: str) -> bool:
    """Return whether a process that has only imported torch may be copied into a child for a run on a device.

    A copy saves the import. System libraries survive it on Linux alone, and a driver of a GPU nowhere.
    """
    has_gpu = device.startswith("cuda") or (device == "auto" and has_gpu_driver())
    return sys.platform == "linux" and not has_gpu


def import_torch() -> None:
    """Import torch, and what it imports with the first optimizer: its compiler, which takes 0.9 s.

    A process that is copied after it spares its copy that time.
    """
    gc.disable()  # collections while torch makes a million objects take a fifth of its import
    import torch

    torch.optim.SGD([torch.zeros(1, device="cpu")])
    gc.freeze()
    gc.enable()


def _open(workload: WorkloadSource, options: Options, world: int) -> Setup:
    from autobatch.rehearsal.setup import open_setup
    from autobatch.workload.user_code import find_workload

    return open_setup(find_workload(workload, options.seed), options, world)


def _last_lines(log: IO[bytes]) -> str:
    """Return the last lines of a child's output in one line, or the place of its crash."""
    # Not from the place where the child writes, which the processes share.
    text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
    lines = [line.strip() for line in text.strip().splitlines()]
    crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return " | ".join(lines[-TAIL_LINES:]) or "nothing"
    frames = [line for line in lines[crash + 1 :] if line.startswith("File ")]
    return " | ".join([lines[crash], *frames[:TAIL_LINES]])


def _serve(connection: Connection, of_parent: Connection | None, output: Connection) -> None:
    """Run the child: import torch, then answer calls until the pipe closes, of which the first opens a setup.

    Args:
        connection: the child's end of the pipe.
        of_parent: in a copy, the parent's end of the pipe, which else would never close.
        output: has the descriptor of the file for the child's output.
    """
    _detach(of_parent, output.fileno())
    from autobatch.device.oom import loses_context
    from autobatch.workload.user_code import to_picklable

    content: Any
    here = None
    with suppress(*ENDED):
        while True:
            function, args, more = connection.recv()
            is_error = is_lost = False
            try:
                if here is None:
                    here = ThisProcess(function(*args))
                    content = here.info
                    # It lives as long as this process, so no collection needs to look at it again.
                    gc.collect()
                    gc.freeze()
                else:
                    content = function(here.setup, *args, **more)
            except (Exception, SystemExit) as error:
                is_error, is_lost, content = True, loses_context(error), to_picklable(error)
            if here is not None:  # outside of the except block, nothing keeps the tensors of a failed call
                try:
                    if is_error:
                        here.setup.device.release()
                    here.setup.device.synchronize()
                except RuntimeError:  # the context of the GPU is gone
                    is_lost = True
            connection.send((is_error, content, is_lost))


def _detach(of_parent: Connection | None, output: int) -> None:
    """Detach the child from the parent's terminal and signals, and import what it needs."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == parent.pid:  # unless a server of `multiprocessing` forked it
        end_with_parent()
    if of_parent is not None:
        of_parent.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_torch()
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Line buffers, because a crash loses buffered output.
    sys.stdout = sys.stderr = os.fdopen(os.dup(output), "w", buffering=1, errors="replace")
    faulthandler.enable(output)
    # The collections at the end of a process with torch take half a second.
    atexit.register(gc.freeze)
    # Trials start loader workers, which a daemon must not. They end with this process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
