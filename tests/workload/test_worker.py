"""Code that runs in a loader worker, called here or in a forked process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from autobatch.core.errors import InputError
from autobatch.core.signals import STOPPING
from autobatch.workload.feed import SeededCollate
from autobatch.workload.split import MicroBatchIds
from autobatch.workload.worker import (
    Failure,
    MicroBatchDataset,
    check_picklable,
    start_method,
    start_worker,
)
from tests.support.training import points


def test_a_worker_calls_the_function_of_the_user_with_its_number() -> None:
    code = (
        "from autobatch.workload.worker import start_worker\n"
        "start_worker(lambda number: print('worker', number), 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "worker 3\n"


PART = MicroBatchIds(batch_index=0, places=[0, 1], ids=[2, 5])


def dataset(collate=None, *, stop: bool = False) -> MicroBatchDataset:
    return MicroBatchDataset(SeededCollate(data=points(), collate=collate, seed=0), ctypes.c_bool(stop))


def test_an_item_is_a_collated_micro_batch() -> None:
    inputs, labels = dataset()[PART]
    assert torch.equal(inputs, points().columns[0][[2, 5]])
    assert torch.equal(labels, points().columns[1][[2, 5]])


def test_an_item_is_left_unfinished_after_a_stop() -> None:
    assert dataset(stop=True)[PART] is None


def test_an_error_of_the_workload_is_sent_in_place_of_the_micro_batch() -> None:
    def collate(samples):
        raise KeyError("gone")

    found = dataset(collate)[PART]
    assert isinstance(found, Failure)
    assert str(found.error).startswith("the workload's collate raised KeyError: 'gone'")
    assert any("Traceback" in note for note in found.error.__notes__)


def test_a_micro_batch_that_cannot_be_sent_is_an_error() -> None:
    found = dataset(lambda samples: threading.Lock())[PART]
    assert isinstance(found, Failure)
    assert isinstance(found.error, InputError)
    assert "cannot be sent from a loader worker (TypeError" in str(found.error)


def test_out_of_memory_is_raised_as_it_is() -> None:
    def collate(samples):
        raise MemoryError("too many")

    with pytest.raises(MemoryError, match="too many"):
        dataset(collate)[PART]


def test_tensors_are_not_pickled_but_everything_else_is() -> None:
    check_picklable({"rows": torch.zeros(2, device="meta"), "name": "n"})
    with pytest.raises(TypeError):
        check_picklable([torch.zeros(2), threading.Lock()])


def test_workers_are_forked_on_linux_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, method in (("linux", "fork"), ("darwin", None), ("win32", None)):
        monkeypatch.setattr(sys, "platform", platform)
        assert start_method() == method


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and asks the kernel for a signal")
def test_a_worker_ignores_stop_signals_and_ends_with_its_parent() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            start_worker(None, 0)
            sent = ctypes.c_int()
            ctypes.CDLL(None).prctl(2, ctypes.byref(sent))  # PR_GET_PDEATHSIG
            for number in STOPPING:
                os.kill(os.getpid(), number)
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            is_right = not blocked & set(STOPPING) and sent.value == signal.SIGKILL
            code = 0 if is_right and signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and asks the kernel for a signal")
def test_a_worker_whose_parent_ended_before_it_started_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for parent, expected in ((os.getpid(), 7), (2**22, 1)):
        process = SimpleNamespace(pid=parent)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda process=process: process)
        pid = os.fork()
        if pid == 0:
            try:
                start_worker(None, 0)
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
