"""Calls in copies of the process: results and errors come back, and nothing stays."""

from __future__ import annotations

import functools
import os
import select
import signal
import threading

import pytest
import torch

import autobatch
from autobatch import AutobatchError, InputError
from autobatch.estimates import copies as copying
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.traced_step import footprint, record
from tests.support.probes import WIDTH, work
from tests.support.step_workloads import setup, traced_step
from tests.support.training import mean_loss

needs_fork = pytest.mark.skipif(not copying.can_copy(), reason="this process cannot be copied")


@pytest.fixture(autouse=True)
def copies() -> None:
    """Run calls in copies, as a run does."""


@needs_fork
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.usefixtures("real_copies")
def test_results_come_back_in_order_and_nothing_that_was_changed_stays(cores, monkeypatch):
    monkeypatch.setattr(copying, "usable_cores", lambda: cores)
    kept: list[int] = []
    found = run_in_copies([lambda n=n: (n * n, kept.append(n), os.getpid()) for n in range(5)])
    assert [square for square, _, _ in found] == [n * n for n in range(5)]
    assert kept == []
    assert len({os.getpid(), *(pid for _, _, pid in found)}) == 6


def test_errors_keep_their_class_message_and_traceback():
    def fail() -> None:
        raise InputError("asked 3, found 2")

    def of_the_user() -> None:
        raise LookupError("gone")

    with pytest.raises(InputError, match=r"^asked 3, found 2$"):
        run_in_copies([fail])
    with pytest.raises(LookupError, match="gone") as caught:
        run_in_copies([of_the_user])
    assert caught.traceback[-1].name == "of_the_user"


@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_a_copy_that_is_killed_is_an_error():
    with pytest.raises(AutobatchError, match=r"exit code -9"):
        run_in_copies([lambda: os.kill(os.getpid(), signal.SIGKILL)])


@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_a_copy_ends_with_the_process_that_was_killed_while_it_waited_for_it():
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_in_copies([lambda: (os.write(sink, b"runs"), signal.pause())])
        finally:
            os._exit(1)
    assert os.read(source, 100) == b"runs"
    os.close(sink)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert select.select([source], [], [], 60)[0], "the copy is still there, and holds the pipe open"
    assert os.read(source, 100) == b""
    os.close(source)


@needs_fork
def test_a_copy_that_waits_for_a_lock_which_is_held_here_leaves_the_call_to_this_process(monkeypatch):
    """Nobody gives the lock back in the copy."""
    monkeypatch.setattr(copying, "STUCK_SECONDS", 0.3)
    here, lock = os.getpid(), threading.Lock()
    lock.acquire()

    def call() -> int:
        if os.getpid() == here:
            lock.release()
        with lock:
            return os.getpid()

    assert run_in_copies([call]) == [here]


@functools.lru_cache
def window() -> torch.Tensor:
    """Return a tensor that the first step builds."""
    return torch.hann_window(WIDTH)


@pytest.mark.program
@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_what_user_code_keeps_is_in_each_trace_and_has_values_in_later_steps():
    windowed = work(loss=lambda model, batch: mean_loss(model, (batch[0] * window(), batch[1])))
    made = traced_step(setup(windowed))
    step = footprint(made)
    (alone,) = run_in_copies([lambda: record(made, 7).trace])
    assert step.program.at(7).events == alone.events
    autobatch.estimate(windowed, profile=["t4", "v100-16gb"], memory_budget="1%")
    assert window.cache_info().currsize == 0, "nothing fake is left in this process"
