"""Calls in copies of the process: results and errors come back, and nothing stays."""

from __future__ import annotations

import functools
import os
import select
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import autobatch
from autobatch import AutobatchError, InputError
from autobatch.estimates import copies as copying
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.footprints import footprint
from autobatch.estimates.traced_step import record
from tests.support.step_workloads import setup, traced_step

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
def test_a_copy_that_waits_for_a_lock_of_another_thread_leaves_the_call_to_this_process(monkeypatch):
    """The thread that holds the lock at the fork does not exist in the copy."""
    monkeypatch.setattr(copying, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(copying, "STUCK_SECONDS", 0.3)
    lock, is_held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            done.wait()

    def call() -> int:
        if os.getpid() == here:
            done.set()
        with lock:
            return os.getpid()

    here = os.getpid()
    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        assert run_in_copies([call]) == [here]
    finally:
        done.set()
        thread.join()


class KeepsWhatItBuilds(nn.Module):
    """A model that scales its input by a window of a cache, and by weights that the class keeps."""

    weights: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    @staticmethod
    @functools.lru_cache
    def window(width: int) -> torch.Tensor:
        return torch.hann_window(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weights is None:
            type(self).weights = torch.linspace(0, 1, 16)
        return self.linear(x * self.window(16) * self.weights)


def workload() -> autobatch.Workload:
    KeepsWhatItBuilds.window.cache_clear()
    KeepsWhatItBuilds.weights = None
    return autobatch.Workload(
        model=KeepsWhatItBuilds,
        train_data=TensorDataset(torch.randn(400, 16), torch.zeros(400, dtype=torch.int64)),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
        learning_rate=0.1,
    )


@pytest.mark.program
@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_what_user_code_keeps_is_in_each_trace_and_has_values_in_later_steps():
    made = traced_step(setup(workload()))
    step = footprint(made)
    (alone,) = run_in_copies([lambda: record(made, 7).trace])
    assert step.program.at(7).events == alone.events
    assert KeepsWhatItBuilds.weights is None, "nothing fake is left in this process"
    autobatch.estimate(workload(), profile=["t4", "v100-16gb"], memory_budget="1%")
    assert torch.equal(KeepsWhatItBuilds.window(16), torch.hann_window(16))
