"""The child process that holds a setup: answers, crashes of every kind, output, and early starts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autobatch import Progress
from autobatch.core.errors import UserCodeError
from autobatch.core.options import Options
from autobatch.rehearsal.process import ChildCrashed, ChildProcess, import_torch, open_process
from autobatch.rehearsal.rehearsal import Outcome, attempt
from autobatch.rehearsal.setup import Setup
from autobatch.search.find_limit import run_attempt
from tests.support.commandline import SMALL

SETTINGS = Options(device="cpu", memory_budget="64MiB")
warm = pytest.mark.usefixtures("warm_children")
FAILS_AT_3 = """
import os, signal, ctypes, sys
def failing(act):
    def loss_at_3(model, batch):
        if len(batch[0]) == 3:
            act()
        return loss(model, batch)
    return small(loss=loss_at_3)
def killed():
    return failing(lambda: os.kill(os.getpid(), signal.SIGKILL))
def crashed():
    return failing(lambda: ctypes.string_at(0))
def exits():
    return failing(lambda: os._exit(7))
def wrong():
    return failing(lambda: 1 / 0)
def losing():
    from autobatch.device.cpu import CpuDevice
    def lost(*_):
        CpuDevice.synchronize = lost
        raise RuntimeError("CUDA error: device-side assert triggered")
    return failing(lost)
def noisy():
    os.write(1, b"garbage from the start")
    def act():
        print("{garbage"); print("garbage", file=sys.stderr)
        os.write(1, b"\\xff\\x00"); os.write(2, b"\\xff")
    return failing(act)
"""


@contextmanager
def child(folder: Path, function: str) -> Iterator[ChildProcess]:
    file = folder / "train.py"
    file.write_text(f"{SMALL}\n{FAILS_AT_3}\n")
    with ChildProcess() as process:
        yield process.open(f"{file}:{function}", SETTINGS, 1)


def pid(setup: Setup) -> int:
    return os.getpid()


def ran(process: ChildProcess, size: int) -> Outcome:
    return process.call(f"an attempt at a micro-batch of {size}", attempt, size)


def die(setup: Setup) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(number: int) -> bool:
    return number in {process.pid for process in multiprocessing.active_children()}


@warm
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("killed", ["an attempt at a micro-batch of 3 (SIGKILL)", "--memory-budget"]),
        ("crashed", ["(SIGSEGV)", "Fatal Python error: Segmentation fault", 'train.py", line']),
        ("exits", ["exit code 7"]),
    ],
)
def test_a_child_that_dies_is_an_error_of_one_line_and_another_answers_the_next_call(
    function: str, said: list[str], tmp_path: Path
) -> None:
    with child(tmp_path, function) as process:
        failed = run_attempt(process, 3, Progress())
        assert ran(process, 2).attempt.fits
    assert isinstance(failed.error, ChildCrashed)
    assert (failed.attempt.fits, failed.attempt.is_error) == (False, True)
    assert all(text in str(failed.error) for text in said), failed.error
    assert "\n" not in str(failed.error)
    assert str(failed.attempt.reason).startswith("the child process ended during an attempt at")


@warm
def test_a_child_that_the_host_killed_for_memory_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autobatch.rehearsal.process.count_oom_kills", itertools.count().__next__)
    with child(tmp_path, "killed") as process:
        refused, *_, error = run_attempt(process, 3, Progress())
    assert (refused.micro_batch, refused.fits, refused.peak_allocated_bytes) == (3, False, None)
    assert (refused.is_error, error) == (False, None)
    assert refused.reason == "the host ran out of memory and ended the child process"


@warm
def test_the_output_of_a_child_stays_off_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with child(tmp_path, "noisy") as process:
        assert process.info.samples == 32
        assert ran(process, 3).attempt.fits
        with pytest.raises(ChildCrashed, match="garbage"):
            process.call("a crash", die)
    assert capfd.readouterr() == ("", "")


@warm
def test_an_error_of_the_workload_keeps_its_place_and_the_same_child_answers_the_next_call(
    tmp_path: Path,
) -> None:
    with child(tmp_path, "wrong") as process:
        first = process.call("a look", pid)
        with pytest.raises(UserCodeError) as found:
            ran(process, 3)
        assert process.call("a look", pid) == first
    line = f"{SMALL}\n{FAILS_AT_3}".splitlines().index("    return failing(lambda: 1 / 0)") + 1
    place = f"{tmp_path / 'train.py'}:{line}"
    assert str(found.value) == f"the workload's loss raised ZeroDivisionError: division by zero ({place})"
    assert "Traceback" in found.value.__notes__[0]


@warm
def test_a_child_whose_gpu_is_lost_tells_why_and_another_answers_the_next_call(tmp_path: Path) -> None:
    with child(tmp_path, "losing") as process:
        first = process.call("a look", pid)
        with pytest.raises(UserCodeError, match="device-side assert"):
            ran(process, 3)
        assert ran(process, 2).attempt.fits
        assert not is_running(first)


def answer(setup: Setup, text: str, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return text


@warm
def test_the_answer_to_an_interrupted_call_is_not_that_of_the_next_call(tmp_path: Path) -> None:
    def interrupt() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        process.call("a slow call", answer, "slow", seconds=0.6)

    with child(tmp_path, "wrong") as process:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        signal.signal(signal.SIGALRM, before)
        assert process.call("a quick call", answer, "quick") == "quick"


def modules(setup: Setup) -> list[str]:
    return list(sys.modules)


@pytest.mark.program
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_child_that_started_early_serves_one_opening_and_a_new_one_the_next(
    is_copy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy has the modules that its parent has; nothing of its output has a name."""
    import_torch()  # as a parent does; torch makes a folder for its own cache then
    monkeypatch.setitem(sys.modules, "made_before_the_copy", sys)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = set(multiprocessing.active_children())
    with ChildProcess(is_copy=is_copy) as early:
        started = (set(multiprocessing.active_children()) - others).pop().pid
        with open_process(None, SETTINGS, 1, early) as process:
            assert process.call("a look", pid) == started
            assert ("made_before_the_copy" in process.call("a look", modules)) is is_copy
            assert list(tmp_path.iterdir()) == []
            with pytest.raises(ChildCrashed, match="SIGKILL"):
                process.call("a crash", die)
        assert not is_running(started)
    with ChildProcess(is_copy=is_copy):
        pass
    assert set(multiprocessing.active_children()) == others
