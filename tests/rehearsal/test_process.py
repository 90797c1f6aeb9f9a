"""The isolated child: killed, crashed, hung, noisy, interrupted, or never used."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autobatch import InputError, Progress
from autobatch.core.errors import UserCodeError
from autobatch.core.options import Options
from autobatch.rehearsal import process as child_module
from autobatch.rehearsal.attempt import Outcome, attempt
from autobatch.rehearsal.process import ChildCrashed, ChildProcess, may_copy, open_process
from autobatch.rehearsal.setup import Role, Setup
from autobatch.search.attempts import run_attempt
from autobatch.step.optimizers import import_for_optimizers
from tests.support.commandline import SMALL

SETTINGS = Options().with_values(device="cpu", memory_budget="64MiB")
warm = pytest.mark.usefixtures("warm_children")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


@contextmanager
def child(train: Path, function: str, code: str = "", **settings) -> Iterator[ChildProcess]:
    train.write_text(f"{SMALL}\n{code}\n")
    with ChildProcess(**settings) as process:
        yield process.open(f"{train}:{function}", SETTINGS, Role())


def pid(setup: Setup) -> int:
    return os.getpid()


def ran(process: ChildProcess, size: int) -> Outcome:
    return process.call(f"an attempt at a micro-batch of {size}", attempt, size)


def die(setup: Setup) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(number: int) -> bool:
    return number in {one.pid for one in multiprocessing.active_children()}


DIES = """
import os, signal, ctypes
def dying(how):
    def loss_that_dies(model, batch):
        if len(batch[0]) == 3:
            how()
        return loss(model, batch)
    return small(loss=loss_that_dies)

def killed():
    return dying(lambda: os.kill(os.getpid(), signal.SIGKILL))

def crashed():
    return dying(lambda: ctypes.string_at(0))

def exits():
    return dying(lambda: os._exit(7))
"""


@warm
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("killed", ["an attempt at a micro-batch of 3 (SIGKILL)", "--memory-budget"]),
        ("crashed", ["(SIGSEGV)", "Fatal Python error: Segmentation fault", 'File "{train}", line']),
        ("exits", ["exit code 7"]),
    ],
)
def test_a_child_that_dies_is_an_error_of_one_line(function: str, said: list[str], train: Path) -> None:
    with child(train, function, DIES, oom_kills=lambda: 5) as process:
        assert ran(process, 2).attempt.fits
        with pytest.raises(ChildCrashed) as found:
            ran(process, 3)
    assert found.value.exit_code == 1
    assert all(text.format(train=train) in str(found.value) for text in said), found.value
    assert "\n" not in str(found.value)


@warm
def test_a_child_that_the_host_killed_for_memory_is_an_answer_and_the_next_one_continues(train: Path) -> None:
    kills = itertools.count()
    with child(train, "killed", DIES, oom_kills=lambda: next(kills)) as process:
        refused = run_attempt(process, 3, Progress()).attempt
        assert (refused.micro_batch, refused.fits, refused.peak_allocated_bytes) == (3, False, None)
        assert refused.reason == "the host ran out of memory and ended the child process"
        assert ran(process, 2).attempt.fits


@warm
def test_a_child_that_was_killed_is_replaced_at_the_next_call(train: Path) -> None:
    with child(train, "workload") as process:
        os.kill(process.call("a look", pid), signal.SIGKILL)
        with pytest.raises(ChildCrashed):
            process.call("a look", pid)
        assert ran(process, 2).attempt.fits


@warm
def test_the_output_of_a_child_stays_off_the_terminal(train: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import os, sys
def noisy(model, batch):
    print("{garbage"); print("garbage", file=sys.stderr)
    os.write(1, b"\\xff\\x00"); os.write(2, b"\\xff")
    return loss(model, batch)
def workload():
    os.write(1, b"garbage from the start")
    return small(loss=noisy)
"""
    with child(train, "workload", code) as process:
        assert process.info.samples == 32
        assert ran(process, 2).attempt.fits
        with pytest.raises(ChildCrashed, match="garbage"):
            process.call("a crash", die)
    assert capfd.readouterr() == ("", "")


@warm
def test_an_error_of_the_workload_keeps_its_place_and_the_next_call_is_answered(train: Path) -> None:
    code = """
class Odd(ValueError):
    def __init__(self, one, two):
        super().__init__("odd")
def odd(model, batch):
    if len(batch[0]) == 3:
        raise Odd(1, 2)
    return loss(model, batch)
def workload():
    return small(loss=odd)
"""
    line = f"{SMALL}\n{code}".splitlines().index("        raise Odd(1, 2)") + 1
    with child(train, "workload", code) as process:
        with pytest.raises(UserCodeError) as found:
            ran(process, 3)
        assert ran(process, 2).attempt.fits
    assert str(found.value) == f"the workload's loss raised Odd: odd ({train}:{line})"
    assert "Traceback" in found.value.__notes__[0]


@warm
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('so')", r"raised RuntimeError: so \(.*train.py:\d+\)"),
        ("def workload(): raise SystemExit(3)", r"called sys.exit\(3\) \(.*train.py:\d+\)"),
        ("def workload(): return 7", "returned an int, not an autobatch.Workload"),
    ],
)
def test_a_child_that_cannot_open_the_workload_raises_the_reason(train: Path, code: str, said: str) -> None:
    with pytest.raises(InputError, match=said), child(train, "workload", code):
        pass


def answer(setup: Setup, text: str, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return text


@warm
def test_the_answer_to_an_interrupted_call_is_not_that_of_the_next_call(train: Path) -> None:
    with child(train, "workload") as process:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)

        def interrupt() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            process.call("a slow call", answer, "slow", seconds=0.6)

        with pytest.raises(KeyboardInterrupt):
            interrupt()
        signal.signal(signal.SIGALRM, before)
        assert process.call("a quick call", answer, "quick") == "quick"


LOSES_THE_GPU = """
from autobatch.device.cpu import CpuDevice
def losing(model, batch):
    if len(batch[0]) == 3:
        def lost(self):
            raise RuntimeError("CUDA error: device-side assert triggered")
        CpuDevice.synchronize = lost
        lost(None)
    return loss(model, batch)
def workload():
    return small(loss=losing)
"""


@warm
def test_a_child_whose_gpu_is_lost_tells_why_and_another_answers_the_next_question(train: Path) -> None:
    with child(train, "workload", LOSES_THE_GPU) as process:
        first = process.call("a look", pid)
        with pytest.raises(UserCodeError, match="device-side assert"):
            ran(process, 3)
        assert is_running(first)
        assert ran(process, 2).attempt.fits
        assert not is_running(first)


def modules(setup: Setup) -> list[str]:
    return list(sys.modules)


@pytest.mark.program
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_child_that_started_early_serves_one_opening_and_a_new_one_the_next(
    is_copy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy has the modules that its parent has; nothing of its output has a name."""
    import_for_optimizers()  # as a parent does; torch makes a folder for its own cache then
    monkeypatch.setitem(sys.modules, "made_before_the_copy", sys)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = set(multiprocessing.active_children())
    with ChildProcess(is_copy=is_copy) as early:
        started = (set(multiprocessing.active_children()) - others).pop().pid
        with open_process(None, SETTINGS, Role(), isolated=True, child=early) as process:
            assert process.call("a look", pid) == started
            assert ("made_before_the_copy" in process.call("a look", modules)) is is_copy
            assert list(tmp_path.iterdir()) == []
            with pytest.raises(ChildCrashed, match="SIGKILL"):
                process.call("a crash", die)
        assert not is_running(started)
    with ChildProcess(is_copy=is_copy):
        pass
    assert set(multiprocessing.active_children()) == others


def test_the_parent_imports_no_torch_to_start_a_child() -> None:
    check = "import sys; import autobatch.rehearsal.process; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("device", "has_driver", "is_copied"),
    [("sim:t4", True, True), ("auto", False, True), ("auto", True, False), ("cuda:1", False, False)],
)
def test_a_child_that_may_use_a_gpu_is_no_copy(
    device: str, has_driver: bool, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "has_gpu_driver", lambda: has_driver)
    monkeypatch.setattr(sys, "platform", "linux")
    assert may_copy(device) is is_copied
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not may_copy(device)
