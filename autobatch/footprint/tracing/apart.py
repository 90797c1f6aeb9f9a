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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import end_with_parent, hold_back_signals
from autobatch.device.host import usable_cores

ANSWER_SECONDS = 600.0
"""Time after which a call counts as hung."""
LOOK_SECONDS = 1.0
"""Time between two looks at copies that have not answered yet."""
STUCK_SECONDS = 20.0
"""Time without any computation after which a copy counts as stuck. A trace only computes, but a copy may wait
for a lock that another thread of this process held at the fork."""
_TURN_BYTES = 4

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
    if not _has_fakes():
        return False
    gc.collect()
    return _has_fakes()


def _has_fakes() -> bool:
    return not can_run_apart() and any(type(one) is FakeTensor for one in gc.get_objects())


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
        AutobatchError: a function raised it; or its copy crashed, or gave no answer in time.
    """
    if not can_run_apart():
        return [function() for function in functions]
    _import_tracing()
    return [
        _result_of(function, answer)
        for function, answer in zip(functions, _ask_copies(functions), strict=True)
    ]


def run_in_copies(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions in copies of this process, one copy per core, and return their results.

    A copy calls one function after another, so a later one finds what earlier ones left: the caches of torch,
    without which a short trace takes twice as long, and those of the user's code. Each copy takes the next
    function that none has taken, so those that take longest come first. What a function would run apart runs
    in the same copy. A function that fails there is called again in a copy of its own; see `run_each_apart`.
    """
    if len(functions) < 2 or not can_run_apart():
        return run_each_apart(functions)
    _import_tracing()
    # The copies share the end of a pipe from which each reads the number of its next function.
    turns, sink = os.pipe()
    os.write(sink, b"".join(number.to_bytes(_TURN_BYTES) for number in range(len(functions))))
    os.close(sink)
    count = min(usable_cores(), len(functions))
    try:
        answers = _ask_copies([partial(_take_turns, functions, turns)] * count, daemon=True)
    finally:
        os.close(turns)
    done = [cast("list[tuple[int, T]]", content) for kind, content in answers if kind == "result"]
    found = dict(chain.from_iterable(done))
    return [found[number] if number in found else run_apart(one) for number, one in enumerate(functions)]


def _take_turns(functions: Sequence[Callable[[], T]], turns: int) -> list[tuple[int, T]]:
    """Call functions until all are taken; return the results of those that were taken here, with numbers."""
    found = []
    while turn := os.read(turns, _TURN_BYTES):
        number = int.from_bytes(turn)
        with suppress(Exception, SystemExit):
            found.append((number, functions[number]()))
    return found


def _result_of(function: Callable[[], T], answer: Answer) -> T:
    kind, content = answer
    if kind == "call here":
        return function()
    if kind == "error":
        raise cast(AutobatchError, content)
    return cast(T, content)


def _import_tracing() -> None:
    """Import here what fake tensors import at their first use, or each copy would import it again."""
    was_enabled = gc.isenabled()
    gc.disable()  # collections while a million objects are made take a fifth of the time
    try:
        import torch._dynamo.config
        import torch.fx.experimental.symbolic_shapes  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()


def _ask_copies(functions: Sequence[Callable[[], object]], *, daemon: bool = False) -> list[Answer]:
    """Return the answers of copies in the order of their functions; a daemon runs nothing apart."""
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
        assert self._process.pid is not None
        self._start = self._worked_at = time.monotonic()
        self._computed = _computed(self._process.pid)

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
        now, computed = time.monotonic(), _computed(self._process.pid or 0)
        if computed is None or computed != self._computed:
            self._worked_at, self._computed = now, computed
        if now - self._worked_at >= STUCK_SECONDS:
            return "call here", None
        if now - self._start < ANSWER_SECONDS:
            return None
        return "error", AutobatchError(
            f"the process that traced the step gave no answer in {ANSWER_SECONDS:.0f} s and was ended"
        )

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


def _computed(process: int) -> list[str] | None:
    """Return the user and system time of a process; None where the system does not tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # After the name, which may have spaces, come fields 3 and on; these are 14 and 15, proc_pid_stat(5).
    return stat.rpartition(")")[2].split()[11:13]
