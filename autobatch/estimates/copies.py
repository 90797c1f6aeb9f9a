"""Calls in copies of this process that are thrown away, as many at a time as there are cores.

Code of the user's may keep what it builds at its first call, for example a window in an ``lru_cache``. If
that call is a trace, it keeps a tensor without values for ever, and no later step with real tensors works. So
a trace runs in a forked process, and only what it measured comes back.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import usable_cores

LOOK_SECONDS = 1.0
"""Time between two looks at copies that have not answered yet."""
STUCK_SECONDS = 20.0
"""Time without any computation after which a copy counts as stuck. A trace only computes, but a copy may wait
for a lock that another thread of this process held at the fork."""
CALL_HERE = None
"""Answer of a copy that cannot make the call."""
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

    They see everything that this process has, and nothing that they change stays. A function is called here
    if no copy is possible (`can_copy`). It is called here again if it raised an error that is not autobatch's
    own, so that the error has its class and traceback, or if its copy is stuck.

    Raises:
        AutobatchError: a function raised it, or its copy crashed.
    """
    if not can_copy():
        return [function() for function in functions]
    # Here, or each copy would import again what fakes import at their first use.
    import torch._dynamo.config
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    waiting, running = [*enumerate(functions)], dict[Connection, tuple[int, Any]]()
    answers: dict[int, tuple[T] | AutobatchError | None] = {}
    worked: dict[Connection, tuple[str | None, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < usable_cores():
                number, function = waiting.pop(0)
                connection, process = _start(function)
                running[connection] = number, process
            ready = wait([*running], LOOK_SECONDS)
            for connection, (number, process) in [*running.items()]:
                ran, now = _run_time(process.pid), time.monotonic()
                before, since = worked.get(connection, (None, now))
                if connection in ready:
                    answers[number] = _answer(connection, process)
                elif ran is not None and ran == before and now - since >= STUCK_SECONDS:
                    answers[number] = CALL_HERE
                else:
                    worked[connection] = ran, since if ran == before else now
                    continue
                del running[connection]
                process.kill()
                process.join()
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    results: list[T] = []
    for number, function in enumerate(functions):
        answer = answers[number]
        if isinstance(answer, AutobatchError):
            raise answer
        results.append(function() if answer is CALL_HERE else answer[0])
    return results


def _start(function: Callable[[], object]) -> tuple[Connection, Any]:
    """Start a copy of this process that calls a function."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function))
    with hold_back_signals({signal.SIGINT}, with_tracker=False), warnings.catch_warnings():
        # Python warns of threads, which the copy does not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return ours, process


def _answer(connection: Connection, process: Any) -> Any:
    """Receive the answer of a copy."""
    try:
        return connection.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        return AutobatchError(f"the process that traced the step ended without an answer (exit code {code})")


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
    answer: object = CALL_HERE
    with suppress(Exception, SystemExit):
        try:
            # A CUDA build of torch refuses autograd in a fork if it ran before it, even without a GPU.
            torch.ones((), requires_grad=True, device="cpu").backward()  # type: ignore[no-untyped-call]
            answer = (function(),)
        except AutobatchError as error:
            answer = error
    connection.send(answer)


def _run_time(process: int) -> str | None:
    """Return the time for which a process ran, as the system writes it; None if it does not tell.

    A process that waits for its own copies runs at each look at them.
    """
    with suppress(OSError):
        return Path(f"/proc/{process}/schedstat").read_text()
    return None
