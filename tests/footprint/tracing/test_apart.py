"""Calls in copies of the process: results and errors come back, and nothing stays."""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import signal
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import autobatch
from autobatch import AutobatchError, InputError
from autobatch.footprint.fit import SIZES, footprint_beside, record_apart
from autobatch.footprint.tracing import apart
from autobatch.footprint.tracing.apart import run_apart, run_in_copies
from tests.support.step_workloads import setting, setup

needs_fork = pytest.mark.skipif(not apart.can_run_apart(), reason="this process cannot be copied")


@pytest.fixture(autouse=True)
def copies() -> None:
    """Run calls in copies, as a run does."""


@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_the_result_comes_back_and_nothing_that_was_changed_stays():
    kept: list[int] = []
    assert run_apart(lambda: kept.append(1) or os.getpid()) != os.getpid()
    assert kept == []


def test_a_copy_that_refuses_autograd_leaves_the_call_to_this_process(monkeypatch):
    """A CUDA build does so after a backward pass here, even without a GPU (engine.cpp, bad autograd fork)."""

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based ...")

    monkeypatch.setattr(torch.Tensor, "backward", refused)
    assert run_apart(os.getpid) == os.getpid()


def test_errors_keep_their_class_message_and_traceback():
    def fail() -> None:
        raise InputError("asked 3, found 2")

    def of_the_user() -> None:
        raise LookupError("gone")

    with pytest.raises(InputError, match=r"^asked 3, found 2$"):
        run_apart(fail)
    with pytest.raises(LookupError, match="gone") as caught:
        run_apart(of_the_user)
    assert caught.traceback[-1].name == "of_the_user"


@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_a_copy_that_is_killed_is_an_error():
    with pytest.raises(AutobatchError, match=r"exit code -9"):
        run_apart(lambda: os.kill(os.getpid(), signal.SIGKILL))


@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_a_copy_ends_with_the_process_that_was_killed_while_it_waited_for_it():
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_apart(lambda: (os.write(sink, b"runs"), signal.pause()))
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
    monkeypatch.setattr(apart, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(apart, "STUCK_SECONDS", 0.3)
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
        assert run_apart(call) == here
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.usefixtures("real_copies")
def test_functions_in_few_copies_answer_in_their_order(cores, monkeypatch):
    monkeypatch.setattr(apart, "usable_cores", lambda: cores)
    assert run_in_copies([lambda n=n: n * n for n in range(30)]) == [n * n for n in range(30)]


@pytest.mark.usefixtures("real_copies")
def test_a_function_that_fails_beside_others_is_called_again_alone(monkeypatch):
    monkeypatch.setattr(apart, "usable_cores", lambda: 2)

    def alone() -> int:
        if multiprocessing.current_process().daemon:
            raise LookupError("what another function has left is in the way")
        return os.getpid()

    shared, first, second = run_in_copies([os.getpid, alone, alone])
    assert len({os.getpid(), shared, first, second}) == 4

    def fails() -> int:
        raise InputError("asked 3, found 2")

    with pytest.raises(InputError, match="asked 3"):
        run_in_copies([os.getpid, fails])


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


@needs_fork
@pytest.mark.usefixtures("real_copies")
def test_what_user_code_keeps_is_in_each_trace():
    asked = replace(setting(setup(workload()), capability=None), steps=(1,))
    step, (other,) = footprint_beside(asked, [(asked, 4)])
    alone, checked = record_apart((asked, SIZES[0]), (asked, 7))
    assert step.program.at(SIZES[0]).canonical() == alone.trace
    assert step.program.at(4).canonical() == other.trace
    assert step.program.at(7).canonical() == checked.trace
    assert KeepsWhatItBuilds.weights is None, "nothing fake is left in this process"


@pytest.mark.program
@needs_fork
def test_state_that_user_code_keeps_from_its_first_call_has_values(tmp_path, monkeypatch):
    if run_apart(os.getpid) == os.getpid():
        pytest.skip("a CUDA build of torch refuses autograd in a copy once it ran here")
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    one = workload()
    autobatch.estimate(one, profile=["t4"], memory_budget="1%")
    found = autobatch.probe(one, device="cpu", memory_budget="24KiB", precision="fp32")
    assert found.predicted_micro_batch == found.micro_batch < 400
    assert torch.equal(KeepsWhatItBuilds.window(16), torch.hann_window(16))
    assert torch.equal(KeepsWhatItBuilds.weights, torch.linspace(0, 1, 16))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_tensor_without_values_is_named_in_a_real_run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    monkeypatch.setattr(apart, "can_run_apart", lambda: False)
    one = workload()
    try:
        with pytest.raises(InputError, match=r"FakeTensor.*lru_cache"):
            autobatch.probe(one, device="cpu", memory_budget="24KiB", precision="fp32")
    finally:
        KeepsWhatItBuilds.window.cache_clear()
        KeepsWhatItBuilds.weights = None
