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
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import end_with_parent, start_quietly
from autobatch.device.host import usable_cores

STUCK_SECONDS = 600.0
"""Time without an answer after which a copy counts as stuck: it may wait for a lock that another thread of
this process held at the fork."""
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

    cores, results, context = usable_cores(), list[T](), multiprocessing.get_context("fork")
    for first in range(0, len(functions), cores):
        copies = list[tuple[Callable[[], T], Connection, Any]]()
        try:
            for function in functions[first : first + cores]:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(theirs, function))
                start_quietly(process, is_copy=True)
                theirs.close()
                copies.append((function, ours, process))
            for function, ours, process in copies:
                answer = _answer(ours, process)
                results.append(function() if answer is CALL_HERE else answer[0])
        finally:
            for _, _, process in copies:
                process.kill()
                process.join()
    return results


def _answer(connection: Connection, process: Any) -> Any:
    """Receive the answer of a copy."""
    try:
        answer = connection.recv() if connection.poll(STUCK_SECONDS) else CALL_HERE
    except EOFError:
        process.join()
        raise AutobatchError(
            f"the process that traced the step ended without an answer (exit code {process.exitcode})"
        ) from None
    if isinstance(answer, AutobatchError):
        raise answer
    return answer


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
