"""Calls in copies of this process that are thrown away.

Code of the user's may keep what it builds at its first call, for example a window in an ``lru_cache``. If
that call is a trace, it keeps a tensor without values for ever, and no later step with real tensors works. So
a trace runs in a forked process, and only what it measured comes back. Traces that do not need each other run
at the same time, one per core.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import usable_cores

LOOK_SECONDS = 1.0
"""Time between two looks at copies that have not answered yet."""
STUCK_SECONDS = 20.0
"""Time without any computation after which a copy counts as stuck. A trace only computes, but a copy may wait
for a lock that another thread of this process held at the fork."""

NUMBER_BYTES = 2
"""Of the number of a call in a pipe, which holds 64 KiB."""

Answer = tuple[Literal["result", "error", "call here"], object]
T = TypeVar("T")


def can_run_apart() -> bool:
    """Return whether `run_apart` forks.

    Elsewhere than on Linux, system libraries do not survive a fork. After CUDA has started, autograd refuses
    to run in one. A daemon of multiprocessing must not start processes.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and not has_cuda and not multiprocessing.current_process().daemon


def has_left_fakes() -> bool:
    """Return whether tensors of a trace that ran in this process are still in use, for example in a cache."""

    def has_fakes() -> bool:
        return any(type(one) is FakeTensor for one in gc.get_objects())

    if can_run_apart() or not has_fakes():
        return False
    gc.collect()
    return has_fakes()


def run_apart(function: Callable[[], T]) -> T:
    """Call a function in a copy of this process, and return its result; see `run_each_apart`."""
    return run_each_apart([function])[0]


def run_each_apart(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Call each function in a copy of this process, and return their results, which are pickled.

    A function is called here if no copy is possible (`can_run_apart`). It is called here again if it raised
    an error that is not autobatch's own, so that the error has its class and traceback, or if its copy is
    stuck.

    Args:
        functions: what to call. They see everything that this process has, and nothing that they change
            stays. As many run at the same time as this process may use cores.

    Raises:
        AutobatchError: a function raised it, or its copy crashed.
    """
    if not can_run_apart():
        return [function() for function in functions]
    found: list[T] = []
    for function, (kind, content) in zip(functions, _ask_copies(functions), strict=True):
        if kind == "error":
            raise cast(AutobatchError, content)
        found.append(function() if kind == "call here" else cast(T, content))
    return found


def run_in_copies(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions in copies of this process, one copy per core, and return their results.

    A copy calls one function after another, so a later one finds what earlier ones left: the caches of torch,
    without which a short trace takes twice as long, and those of the user's code. What a function would run
    apart runs in the same copy. A function that fails there is called again in a copy of its own; see
    `run_each_apart`.
    """
    if len(functions) < 2 or not can_run_apart():
        return run_each_apart(functions)
    # Each copy reads the next number from here, so none idles while another one has several to call.
    numbers, ends = os.pipe()
    with open(ends, "wb") as waiting:
        waiting.write(b"".join(number.to_bytes(NUMBER_BYTES) for number in range(len(functions))))
    done: dict[int, T] = {}
    try:
        count = min(usable_cores(), len(functions))
        for kind, content in _ask_copies([partial(_results_of, functions, numbers)] * count, daemon=True):
            if kind == "result":
                done |= cast("dict[int, T]", content)
    finally:
        os.close(numbers)
    return [done[number] if number in done else run_apart(one) for number, one in enumerate(functions)]


def _results_of(functions: Sequence[Callable[[], T]], numbers: int) -> dict[int, T]:
    """Call the functions whose numbers a pipe has, and return the results of those that do not fail."""
    found = {}
    while read := os.read(numbers, NUMBER_BYTES):
        number = int.from_bytes(read)
        try:
            found[number] = functions[number]()
        except (Exception, SystemExit):  # called again alone
            continue
    return found


@contextmanager
def without_collections() -> Iterator[None]:
    """Import within the block in three quarters of the time: a million objects come, and none goes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _import_tracing() -> None:
    """Import here what fake tensors import at their first use, or each copy would import it again."""
    with without_collections():
        import torch._dynamo.config
        import torch.fx.experimental.symbolic_shapes  # noqa: F401


def _ask_copies(functions: Sequence[Callable[[], object]], *, daemon: bool = False) -> list[Answer]:
    """Return the answers of copies in the order of their functions; a daemon runs nothing apart."""
    _import_tracing()
    answers: dict[int, Answer] = {}
    running: dict[int, _Copy] = {}
    waiting = list(enumerate(functions))
    try:
        while waiting or running:
            while waiting and len(running) < usable_cores():
                number, function = waiting.pop(0)
                running[number] = _Copy(function, daemon=daemon)
            multiprocessing.connection.wait([one.answers for one in running.values()], LOOK_SECONDS)
            for number, copy in list(running.items()):
                answer = copy.answer()
                if answer is not None:
                    answers[number] = answer
                    running.pop(number).end()
    finally:
        for copy in running.values():
            copy.end()
    return [answers[number] for number in range(len(functions))]


class _Copy:
    """A copy of this process that calls a function.

    Args:
        function: what it calls.
        daemon: forbid it to start processes.
    """

    def __init__(self, function: Callable[[], object], *, daemon: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, function), daemon=daemon)
        with hold_back_signals({signal.SIGINT}, with_tracker=False), warnings.catch_warnings():
            # Python warns of threads, which the copy does not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._computed: list[str] | None = None
        self._worked_at = time.monotonic()

    def answer(self) -> Answer | None:
        """Return the answer, None if there is none yet."""
        if self.answers.poll():
            try:
                return cast(Answer, self.answers.recv())
            except EOFError:
                self._process.join()
                return "error", AutobatchError(
                    "the process that traced the step ended without an answer "
                    f"(exit code {self._process.exitcode})"
                )
        computed = _computed(self._process.pid)
        if computed is None or computed != self._computed:
            self._worked_at, self._computed = time.monotonic(), computed
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


def _computed(process: int | None) -> list[str] | None:
    """Return the user and system time of a process; None where the system does not tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # After the name, which may have spaces, come fields 3 and on; these are 14 and 15, proc_pid_stat(5).
    return stat.rpartition(")")[2].split()[11:13]
