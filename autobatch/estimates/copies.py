"""Calls in copies of this process that are thrown away, as many at a time as there are cores.

Code of the user's may keep what it builds at its first call, for example a window in an ``lru_cache``. If
that call is a trace, it keeps a tensor without values for ever, and no later step with real tensors works. So
a trace runs in a forked process, and only what it measured comes back.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import usable_cores

LOOK_SECONDS = 1.0
"""Time between two looks at copies that have not answered yet."""
STUCK_SECONDS = 20.0
"""Time without any computation after which a copy counts as stuck. A trace only computes, but a copy may wait
for a lock that another thread of this process held at the fork."""
Answer = tuple[Literal["result", "error", "call here"], object]
T = TypeVar("T")


def can_copy() -> bool:
    """Return whether `run_in_copies` forks.

    Elsewhere than on Linux, system libraries do not survive a fork. After CUDA has started, autograd refuses
    to run in one. A daemon of multiprocessing must not start processes.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and not has_cuda and not multiprocessing.current_process().daemon


def run_in_copies(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Call each function in a copy of this process, and return their results, which are pickled.

    A function is called here if no copy is possible (`can_copy`). It is called here again if it raised an
    error that is not autobatch's own, so that the error has its class and traceback, or if its copy is stuck.

    Args:
        functions: what to call. They see everything that this process has, and nothing that they change
            stays.

    Raises:
        AutobatchError: a function raised it, or its copy crashed.
    """
    if not can_copy():
        return [function() for function in functions]
    # Here, or each copy would import again what fakes import at their first use.
    import torch._dynamo.config
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    waiting, running = list(enumerate(functions)), dict[int, _Copy]()
    answers: dict[int, Answer] = {}
    try:
        while waiting or running:
            while waiting and len(running) < usable_cores():
                number, function = waiting.pop(0)
                running[number] = _Copy(function)
            multiprocessing.connection.wait([copy.answers for copy in running.values()], LOOK_SECONDS)
            for number, copy in list(running.items()):
                answer = copy.answer()
                if answer is not None:
                    answers[number] = answer
                    running.pop(number).end()
    finally:
        for copy in running.values():
            copy.end()
    results: list[T] = []
    for number, function in enumerate(functions):
        kind, content = answers[number]
        if kind == "error":
            raise cast(AutobatchError, content)
        results.append(function() if kind == "call here" else cast(T, content))
    return results


class _Copy:
    """A copy of this process that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        context = multiprocessing.get_context("fork")
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, function))
        with hold_back_signals({signal.SIGINT}, with_tracker=False), warnings.catch_warnings():
            # Python warns of threads, which the copy does not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._ran: str | None = None
        self._worked_at = time.monotonic()

    def answer(self) -> Answer | None:
        """Return the answer, None if there is none yet."""
        if self.answers.poll():
            try:
                return cast(Answer, self.answers.recv())
            except EOFError:
                self._process.join()
                code = self._process.exitcode
                return "error", AutobatchError(
                    f"the process that traced the step ended without an answer (exit code {code})"
                )
        ran = _run_time(self._process.pid)
        if ran is None or ran != self._ran:
            self._worked_at, self._ran = time.monotonic(), ran
        is_stuck = time.monotonic() - self._worked_at >= STUCK_SECONDS
        return ("call here", None) if is_stuck else None

    def end(self) -> None:
        """End the process."""
        self.answers.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, function: Callable[[], object]) -> None:
    """Send the result of a function, or its error."""
    # A child that is killed can end nothing itself.
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A collection would write to every object, and so copy the memory that both processes share. The process
    # ends before its garbage matters.
    gc.disable()
    # The threads of OpenMP do not exist here. As in a loader worker, nothing may wait for them.
    torch.set_num_threads(1)
    answer: Answer
    try:
        # A CUDA build of torch refuses autograd in a fork if it ran before it, even without a GPU.
        torch.ones((), requires_grad=True, device="cpu").backward()  # type: ignore[no-untyped-call]
        answer = "result", function()
    except AutobatchError as error:
        answer = "error", error
    except (Exception, SystemExit):
        answer = "call here", None
    connection.send(answer)


def _run_time(process: int | None) -> str | None:
    """Return the time for which a process ran, as the system writes it; None where it does not tell.

    A process that waits for its own copies runs at each look at them.
    """
    try:
        return Path(f"/proc/{process}/schedstat").read_text()
    except OSError:
        return None
