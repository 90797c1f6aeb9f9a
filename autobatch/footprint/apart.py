"""A call in a copy of this process that is thrown away.

Code of the user's may keep what it builds at its first call, for example a window in an ``lru_cache``. If
that call is a trace, it keeps a tensor without values for ever, and no later step with real tensors works. So
a trace runs in a forked process, and only what it measured comes back.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal, TypeVar, cast

import torch

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import hold_back_signals

ANSWER_SECONDS = 600.0
"""Time after which a call counts as hung, for example on a lock that another thread held at the fork."""

Kind = Literal["result", "error", "foreign error"]
T = TypeVar("T")


def can_run_apart() -> bool:
    """Return whether `run_apart` forks.

    Elsewhere than on Linux, system libraries do not survive a fork. After CUDA has started, autograd refuses
    to run in one. A daemon of multiprocessing must not start processes.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and not has_cuda and not multiprocessing.current_process().daemon


def run_apart(function: Callable[[], T]) -> T:
    """Call a function in a copy of this process, and return its result, which is pickled.

    The function is called here if no copy is possible (`can_run_apart`). It is called here again if it raised
    an error that is not autobatch's own, so that the error has its class and traceback.

    Args:
        function: what to call. It sees everything that this process has, and nothing that it changes stays.

    Raises:
        AutobatchError: the function raised it; or the copy crashed, or gave no answer in time.
    """
    if not can_run_apart():
        return function()
    kind, content = _ask_copy(function)
    if kind == "foreign error":
        return function()
    if kind == "error":
        raise cast(AutobatchError, content)
    return cast(T, content)


def _ask_copy(function: Callable[[], object]) -> tuple[Kind, object]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function), daemon=False)
    try:
        with hold_back_signals({signal.SIGINT}), warnings.catch_warnings():
            # Python warns of threads, which the copy does not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        if not ours.poll(ANSWER_SECONDS):
            return "error", AutobatchError(
                f"the process that traced the step gave no answer in {ANSWER_SECONDS:.0f} s and was ended"
            )
        return cast(tuple[Kind, object], ours.recv())
    except EOFError:
        process.join()
        return "error", AutobatchError(
            f"the process that traced the step ended without an answer (exit code {process.exitcode})"
        )
    finally:
        ours.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _serve(connection: Connection, function: Callable[[], object]) -> None:
    """Send the result of a function, or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A collection would write to every object, and so copy the memory that both processes share.
    gc.freeze()
    # The threads of OpenMP do not exist here. As in a loader worker, nothing may wait for them.
    torch.set_num_threads(1)
    answer: tuple[Kind, object]
    try:
        # A CUDA build of torch refuses autograd in a fork if it ran before it, even without a GPU.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        answer = "result", function()
    except AutobatchError as error:
        answer = "error", error
    except (Exception, SystemExit):
        answer = "foreign error", None
    connection.send(answer)
