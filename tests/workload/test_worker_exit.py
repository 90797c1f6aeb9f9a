"""Exits of processes, noticed while waiting and between waits."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import pytest

from autobatch.workload.worker_exit import LoaderWorkerCrashed, WorkerExits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")
FORK = multiprocessing.get_context("fork") if sys.platform == "linux" else None


@contextmanager
def watched(*work: Callable[[], object]) -> Iterator[tuple[WorkerExits, list[BaseProcess]]]:
    """Watch forked processes that each call a function."""
    exits = WorkerExits()
    processes = [FORK.Process(target=one) for one in work]
    with exits.starting():
        for process in processes:
            process.start()
    try:
        yield exits, processes
    finally:
        exits.kill()


def endless() -> None:
    while True:
        time.sleep(60)


def die_of(number: int) -> None:
    faulthandler.disable()  # pytest's would print
    os.kill(os.getpid(), number)


def test_nothing_is_raised_while_all_workers_run() -> None:
    with watched(endless, endless) as (exits, processes):
        exits.check()
        with exits.waiting():
            pass
    assert all(process.exitcode == -signal.SIGKILL for process in processes)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (partial(os._exit, 3), r"loader worker \d+ ended with exit code 3: see its output above"),
        (
            partial(die_of, signal.SIGKILL),
            r"ended with signal SIGKILL: use fewer --workers .* or fetch without workers \(--workers 0\)",
        ),
        (partial(die_of, signal.SIGBUS), r"ended with signal SIGBUS: use a larger /dev/shm"),
    ],
)
def test_an_exit_is_described_at_the_next_check(leave: Callable[[], object], message: str) -> None:
    with watched(endless, leave) as (exits, (_, process)):
        process.join()
        with pytest.raises(LoaderWorkerCrashed, match=message) as found:
            exits.check()
    assert str(process.pid) in str(found.value)


def at(file: str) -> SimpleNamespace:
    """Stand in for a frame in a file."""
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=f"/lib/{file}"))


def test_an_exit_ends_a_wait_and_nothing_else() -> None:
    with watched(partial(os._exit, 3)) as (exits, (process,)):
        process.join()
        handle = signal.getsignal(signal.SIGCHLD)
        handle(signal.SIGCHLD, at("connection.py"))  # not waiting
        with exits.waiting():
            handle(signal.SIGCHLD, at("train.py"))
        with pytest.raises(LoaderWorkerCrashed, match="exit code 3"), exits.waiting():
            handle(signal.SIGCHLD, at("connection.py"))


def test_a_broken_pipe_names_the_worker_that_broke_it() -> None:
    with (
        watched(partial(os._exit, 3)) as (exits, _),
        pytest.raises(LoaderWorkerCrashed, match="exit code 3") as found,
        exits.waiting(),
    ):
        raise EOFError
    assert isinstance(found.value.__context__, EOFError)


def test_other_errors_pass_while_all_workers_run() -> None:
    with watched(endless) as (exits, _), pytest.raises(KeyError), exits.waiting():
        raise KeyError


def test_the_handler_of_before_is_called_and_comes_back() -> None:
    seen = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with watched(partial(os._exit, 0)) as (_, (process,)):
            process.join()
            deadline = time.monotonic() + 30
            while not seen and time.monotonic() < deadline:
                time.sleep(0.01)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert signal.SIGCHLD in seen
