"""A process that waits for a lock is told from one that works, sleeps or reads."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autobatch.footprint.tracing import apart as stuck
from autobatch.footprint.tracing.apart import StuckWatch

TICKS = "7 (a) b) S" + 10 * " 0" + " {} {}" + 30 * " 0"


def described(proc: Path, *threads: tuple[str, int, int]) -> None:
    for number, (waits_for, user, system) in enumerate(threads):
        task = proc / "7" / "task" / str(7 + number)
        task.mkdir(parents=True, exist_ok=True)
        (task / "wchan").write_text(waits_for)
        (task / "stat").write_text(TICKS.format(user, system))


def test_only_a_process_whose_threads_all_wait_for_locks_without_work_is_stuck(tmp_path):
    locked = ("futex_wait_queue", 3, 4)
    watch = StuckWatch(7, 0.0, proc=tmp_path)
    described(tmp_path, locked)
    assert not watch.is_stuck(5.0)
    assert not watch.is_stuck(5.0 + 0.9 * stuck.STUCK_SECONDS)
    assert watch.is_stuck(5.0 + stuck.STUCK_SECONDS)
    described(tmp_path, ("futex_wait_queue", 4, 4))
    assert not watch.is_stuck(40.0)
    described(tmp_path, locked, ("do_poll", 0, 0))
    assert not watch.is_stuck(41.0)
    described(tmp_path, locked, locked)
    assert not watch.is_stuck(42.0)
    assert watch.is_stuck(42.0 + stuck.STUCK_SECONDS)


def test_a_system_that_tells_nothing_calls_nothing_stuck(tmp_path):
    assert not StuckWatch(7, 0.0, proc=tmp_path).is_stuck(1e9)
    described(tmp_path, ("0", 0, 0))
    assert not StuckWatch(7, 0.0, proc=tmp_path).is_stuck(1e9)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a thread waits for")
@pytest.mark.parametrize(("function", "expected"), [(wait_for_a_lock, True), (signal.pause, False)])
def test_a_real_process_is_stuck_at_a_lock_only(function: Callable[[], None], expected: bool):
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    try:
        waits_for = Path(f"/proc/{process.pid}/wchan")
        if waits_for.read_text() == "":
            pytest.skip("this system does not tell what a thread waits for")
        watch = StuckWatch(process.pid, 0.0)
        found = []
        for number in range(20):
            found.append(watch.is_stuck(number * stuck.STUCK_SECONDS))
            time.sleep(0.01)
        assert found[-1] == expected
    finally:
        process.kill()
        process.join()
