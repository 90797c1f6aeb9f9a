"""A child process that waits for its workload."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autobatch.core.options import Options
from autobatch.setup import standby as standbys
from autobatch.setup.child import ChildCrashed, Session, open_process
from autobatch.setup.standby import Output, may_copy, standby_child

SETTINGS = Options().with_values(device="cpu", memory_budget="1GiB")


def test_a_spare_child_serves_the_first_workload_and_a_new_one_the_next() -> None:
    with standby_child() as standby:
        with open_process(None, SETTINGS, isolated=True, standby=standby) as first:
            assert first._process.pid == standby.process.pid
            assert first.info.samples > 0
        assert not standby.process.is_alive()
        assert standby.is_taken


def test_a_child_that_nobody_takes_is_ended() -> None:
    with standby_child() as standby:
        assert standby.process.is_alive()
    assert not standby.process.is_alive()
    with pytest.raises(ValueError, match="closed"):
        standby.log.read()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_output_of_a_child_is_in_a_file_without_a_name(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = Output()
    process = multiprocessing.get_context(method).Process(target=write_and_crash, args=(log,))
    process.start()
    process.join()
    assert log.read() == "first\nlast\n"
    assert log.read() == "first\nlast\n"
    assert list(tmp_path.iterdir()) == []
    log.close()


def write_and_crash(log: Output) -> None:
    os.write(log.descriptor, b"first\n")
    os.write(log.descriptor, b"last\n")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_parent_imports_no_torch_to_start_it() -> None:
    check = "import sys; import autobatch.setup.standby; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def die(session: Session) -> None:
    os.kill(os.getpid(), 9)


def has_torch_of_parent(session: Session) -> bool:
    """Return whether this process saw a module that only its parent has made."""
    return "made_before_the_copy" in sys.modules


def test_a_copy_serves_the_workload_with_the_modules_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_before_the_copy", sys)
    with (
        standby_child(is_copy=True) as standby,
        open_process(None, SETTINGS, isolated=True, standby=standby) as child,
    ):
        assert child.call("a look", has_torch_of_parent)
        with pytest.raises(ChildCrashed, match="SIGKILL"):
            child.call("a crash", die)
    assert not standby.process.is_alive()


def test_a_copy_that_nobody_takes_is_ended() -> None:
    with standby_child(is_copy=True) as standby:
        assert standby.process.is_alive()
    assert not standby.process.is_alive()


@pytest.mark.parametrize(
    ("device", "has_driver", "is_copied"),
    [
        ("cpu", True, True),
        ("sim:t4", True, True),
        ("auto", False, True),
        ("auto", True, False),
        ("cuda", False, False),
        ("cuda:1", True, False),
    ],
)
def test_a_child_that_may_use_a_gpu_is_no_copy(
    device: str, has_driver: bool, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "has_gpu_driver", lambda: has_driver)
    monkeypatch.setattr(sys, "platform", "linux")
    assert may_copy(device) is is_copied
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not may_copy(device)
