"""The child process: killed, crashed, hung, noisy, or never started."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autobatch.core.errors import AutobatchError, InputError, UserCodeError
from autobatch.core.options import Options
from autobatch.search.questions import remedies, run_attempt
from autobatch.setup.child import ChildProcess, Session, open_process
from autobatch.workload.user_code import to_picklable
from tests.support.commandline import SMALL

pytestmark = pytest.mark.usefixtures("warm_children")
SETTINGS = Options().with_values(device="cpu", memory_budget="64MiB")


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train.py"
    path.write_text(SMALL)
    return path


def child(train: Path, function: str, code: str, **settings: object) -> ChildProcess:
    train.write_text(f"{SMALL}\n{code}\n")
    return ChildProcess(f"{train}:{function}", SETTINGS, **settings)  # type: ignore[arg-type]


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


def test_a_child_that_is_killed_over_an_optional_question_is_replaced(train: Path) -> None:
    with child(train, "workload", "") as process:
        os.kill(process._process.pid, signal.SIGKILL)
        assert remedies(process) == []
        assert run_attempt(process, 2).attempt.fits


def test_a_child_that_the_host_killed_for_memory_is_an_answer_and_the_next_one_continues(train: Path) -> None:
    kills = itertools.count()
    with child(train, "killed", DIES, oom_kills=lambda: next(kills)) as process:
        refused = run_attempt(process, 3).attempt
        assert (refused.micro_batch, refused.fits, refused.peak_allocated_bytes) == (3, False, None)
        assert refused.reason == "the host ran out of memory and ended the child process"
        assert run_attempt(process, 2).attempt.fits


def test_a_child_that_was_killed_for_another_reason_is_an_error(train: Path) -> None:
    with (
        child(train, "killed", DIES, oom_kills=lambda: 5) as process,
        pytest.raises(
            AutobatchError, match=r"an attempt at a micro-batch of 3 \(SIGKILL\).*--memory-budget"
        ) as found,
    ):
        run_attempt(process, 3)
    assert found.value.exit_code == 1


def test_a_crash_names_the_line_where_it_happened(train: Path) -> None:
    with child(train, "crashed", DIES) as process:
        assert run_attempt(process, 2).attempt.fits
        with pytest.raises(AutobatchError, match=r"\(SIGSEGV\)") as found:
            run_attempt(process, 3)
    assert "Fatal Python error: Segmentation fault" in str(found.value)
    assert f'File "{train}", line' in str(found.value)
    assert "\n" not in str(found.value)


def test_a_child_that_exits_is_an_error_with_its_code(train: Path) -> None:
    with child(train, "exits", DIES) as process, pytest.raises(AutobatchError, match="exit code 7"):
        run_attempt(process, 3)


def test_a_child_that_hangs_is_ended(train: Path) -> None:
    code = """
import time
def hanging(model, batch):
    print("looking for the answer", flush=True)
    time.sleep(600)
def workload():
    return small(loss=hanging)
"""
    with child(train, "workload", code, answer_seconds=60) as process:
        process._answer_seconds = 0.5
        with pytest.raises(
            AutobatchError, match=r"no answer in .* s during an attempt .*looking for the answer"
        ):
            run_attempt(process, 2)
        assert process._process.exitcode == -signal.SIGKILL


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
        assert run_attempt(process, 2).attempt.fits
        assert "garbage" in process._tail()
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_workload_keeps_its_place_and_traceback(train: Path) -> None:
    code = """
class Odd(ValueError):
    def __init__(self, one, two):
        super().__init__("odd")
def odd(model, batch):
    raise Odd(1, 2)
def workload():
    return small(loss=odd)
"""
    line = f"{SMALL}\n{code}".splitlines().index("    raise Odd(1, 2)") + 1
    with child(train, "workload", code) as process, pytest.raises(UserCodeError) as found:
        run_attempt(process, 2)
    assert str(found.value) == f"the workload's loss raised Odd: odd ({train}:{line})"
    assert "Traceback" in found.value.__notes__[0]


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


def test_errors_of_the_users_own_classes_become_user_code_errors() -> None:
    class Theirs(InputError):
        pass

    for error in (Theirs("a"), ZeroDivisionError("b"), SystemExit(2)):
        carried = to_picklable(error)
        assert type(carried) is UserCodeError
    assert type(to_picklable(InputError("c"))) is InputError


def test_a_child_that_raised_an_error_answers_the_next_call(train: Path) -> None:
    code = """
def odd(model, batch):
    if len(batch[0]) == 3:
        raise ValueError("three")
    return loss(model, batch)
def workload():
    return small(loss=odd)
"""
    with child(train, "workload", code) as process:
        with pytest.raises(UserCodeError, match="three"):
            run_attempt(process, 3)
        assert run_attempt(process, 2).attempt.fits


def slow_answer(session: Session, seconds: float) -> str:
    del session
    time.sleep(seconds)
    return "slow"


def quick_answer(session: Session) -> str:
    del session
    return "quick"


def test_the_answer_to_an_interrupted_call_is_not_that_of_the_next_call(
    train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(train, "workload", "") as process:
        with monkeypatch.context() as patch:
            patch.setattr(process, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                process.call("a slow call", slow_answer, 0.2)
        assert process.call("a quick call", quick_answer) == "quick"


def interrupted(act: str) -> None:
    raise KeyboardInterrupt(act)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_session_keeps_one_value_of_a_type_until_a_restart(isolated: bool, train: Path) -> None:
    with open_process(f"{train}:workload", SETTINGS, isolated=isolated) as process:
        assert [process.call("counting", count) for _ in range(3)] == [1, 2, 3]
        process.restart()
        assert process.call("counting", count) == (1 if isolated else 4)


class Counter:
    def __init__(self) -> None:
        self.calls = 0


def count(session: Session) -> int:
    counter = session.find(Counter) or session.keep(Counter())
    counter.calls += 1
    return counter.calls


pytestmark = pytest.mark.usefixtures("warm_children")
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


def test_a_child_whose_gpu_is_lost_tells_why_and_another_answers_the_next_question(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"{SMALL}\n{LOSES_THE_GPU}\n")
    settings = Options().with_values(device="cpu", memory_budget="64MiB")
    with ChildProcess(f"{file}:workload", settings) as process:
        first = process._process.pid
        with pytest.raises(UserCodeError, match="device-side assert"):
            run_attempt(process, 3)
        assert process._process.pid == first
        assert run_attempt(process, 2).attempt.fits
        assert process._process.pid != first
