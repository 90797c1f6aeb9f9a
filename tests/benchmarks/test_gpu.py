"""The measurements on a GPU: their journal, their process and their table."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest

from autobatch.core.units import GiB, MiB
from autobatch.device.profiles import load_profile, read_profile
from benchmarks.gpu import claims, commands, keep
from benchmarks.gpu.__main__ import measure
from benchmarks.gpu.journal import BEGUN, CUT, DONE, FAILED, FILE, Journal, last_call, latest
from benchmarks.gpu.recordings import Mismatch, mismatches, reduced
from benchmarks.gpu.work import LOST, Unit, work


def entries(*actions):
    return [{"action": action, "addr": 4096 + address, "size": size} for action, address, size in actions]


BY_HAND = [
    ("segment_alloc", 0, 2 * MiB),
    ("alloc", 0, 600),  # small: a segment of 2 MiB
    ("alloc", 1024, 512),  # in the same
    ("segment_alloc", 16 * MiB, 20 * MiB),
    ("alloc", 16 * MiB, 5 * MiB),  # under 10 MiB: a segment of 20
    ("alloc", 21 * MiB, 15 * MiB),  # fills it
    ("free_requested", 16 * MiB, 5 * MiB),
    ("free_completed", 16 * MiB, 5 * MiB),
    ("alloc", 16 * MiB, 3 * MiB),  # the hole that was left
    ("segment_alloc", 64 * MiB, 12 * MiB),
    ("alloc", 64 * MiB, 11 * MiB),  # of its own size, in steps of 2 MiB
    ("free_completed", 64 * MiB, 11 * MiB),
    ("segment_free", 64 * MiB, 12 * MiB),  # the cache was emptied
    ("alloc", 2048, 512),
]


def test_the_entries_of_the_allocator_by_hand():
    small = reduced(entries(*BY_HAND))
    assert small[0] == ("segment_alloc", 0, 2 * MiB)
    assert not [action for action, _, _ in small if action == "free_requested"]
    assert mismatches(small) == []


def test_a_gpu_that_allocates_differently_is_noticed():
    other = [(action, address, 4 * MiB if size == 2 * MiB else size) for action, address, size in BY_HAND]
    assert mismatches(other)[0] == Mismatch(1, 4 * MiB, 2 * MiB)


def test_a_dying_process_leaves_the_rows_before_it(tmp_path):
    journal = Journal(tmp_path, 1)
    journal.write("a/1", BEGUN)
    journal.write("a/1", DONE, found={"x": 1})
    journal.write("a/2", BEGUN)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"call": 1, "unit": "a/2", "sta')
    assert [row["status"] for row in journal.rows()] == [BEGUN, DONE, BEGUN]
    unfinished = journal.unfinished()
    assert unfinished is not None
    assert unfinished["unit"] == "a/2"
    assert last_call(tmp_path) == 1
    assert Journal(tmp_path, 2).unfinished() is None
    assert Journal(tmp_path, 2).tried_before() == {"a/1", "a/2"}


def units(ran, *names, seconds=0.0):
    def run(name):
        def inner():
            ran.append(name)
            if "bad" in name:
                raise ValueError(f"{name} broke")
            return {"name": name}

        return inner

    return [Unit(name, seconds, run(name)) for name in names]


def test_a_failure_is_a_row_and_the_next_unit_follows(tmp_path):
    ran = []
    journal = Journal(tmp_path, 1)
    given = units(ran, "a/1", "a/bad", "b/1")
    assert work(given, journal, time.time() + 60, lambda: False) == 0
    assert ran == ["a/1", "a/bad", "b/1"]
    failed = latest(journal.rows())["a/bad"]
    assert failed["error"] == "ValueError: a/bad broke"
    assert any("test_gpu.py" in line for line in failed["where"])
    assert journal.done() == {"a/1", "b/1"}


def test_a_later_call_tries_first_what_no_call_has_tried(tmp_path):
    ran = []
    work(units(ran, "a/1", "a/bad"), Journal(tmp_path, 1), time.time() + 60, lambda: False)
    work(units(ran, "a/1", "a/bad", "b/1"), Journal(tmp_path, 2), time.time() + 60, lambda: False)
    assert ran == ["a/1", "a/bad", "b/1", "a/bad"]


def test_a_lost_context_ends_the_process_and_the_next_one_goes_on(tmp_path):
    ran = []
    given = units(ran, "a/1", "a/2")
    assert work(given, Journal(tmp_path, 1), time.time() + 60, lambda: True) == LOST
    assert work(given, Journal(tmp_path, 1), time.time() + 60, lambda: False) == 0
    assert ran == ["a/1", "a/2"]


BEGINS = (
    "import os, subprocess, sys, time; from pathlib import Path; from benchmarks.gpu.journal import *;"
    "folder = Path(sys.argv[1]); Journal(folder, 1).write('a/1', BEGUN);"
)


def test_the_unit_in_which_a_process_died_is_told(tmp_path):
    journal = Journal(tmp_path, 1)
    command = [sys.executable, "-c", BEGINS + "os._exit(5)", str(tmp_path)]
    assert measure(command, journal, time.time() + 60) is True
    assert journal.rows()[-1] == {
        "call": 1, "unit": "a/1", "status": FAILED, "error": "the process ended with 5"
    }  # fmt: skip


def test_a_unit_that_hangs_is_ended_and_the_next_process_goes_on(tmp_path):
    journal = Journal(tmp_path, 1)
    hangs = BEGINS.replace("BEGUN)", "BEGUN, until=time.time())") + "time.sleep(600)"
    assert measure([sys.executable, "-c", hangs, str(tmp_path)], journal, time.time() + 60) is True
    assert journal.rows()[-1] == {"call": 1, "unit": "a/1", "status": CUT, "error": "it took too long"}


@pytest.mark.program
def test_the_end_of_the_time_ends_the_processes_of_a_unit_too(tmp_path, monkeypatch):
    journal = Journal(tmp_path, 1)
    started = tmp_path / "pid"
    clock = SimpleNamespace(time=lambda: 90.0 if started.exists() and started.stat().st_size else 0.0)
    monkeypatch.setattr("benchmarks.gpu.__main__.time", clock)
    child = BEGINS + (
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "(folder / 'pid').write_text(str(p.pid)); time.sleep(600)"
    )
    assert measure([sys.executable, "-c", child, str(tmp_path)], journal, 60.0) is False
    assert journal.rows()[-1]["status"] == CUT
    pid = int(started.read_text())
    for _ in range(500):  # the kernel reaps it when it likes
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "Z" in (tmp_path.__class__(f"/proc/{pid}/stat")).read_text().split()[2]:
            return
        time.sleep(0.01)
    pytest.fail("the process of the unit still runs")


def test_a_table_by_hand():
    limit = {"exact": True, "runs": 3, "errors": 1}
    rows = [
        {"unit": "facts/versions", "status": DONE, "found": {"gpu": "A", "torch": "2", "cuda": "13"}},
        {"unit": "limit/a", "status": DONE, "found": limit},
        {"unit": "limit/b", "status": DONE, "found": limit | {"exact": False, "runs": 5}},
        {"unit": "facts/context", "status": DONE, "found": {"first": GiB, "last": GiB + 65 * MiB}},
        {"unit": "speed/a", "status": FAILED, "error": "RuntimeError: no"},
    ]
    text = claims.table(rows)
    assert text.startswith("A, torch 2, CUDA 13\n")
    assert "1 of 2 exact; 4 runs and 1 errors in the median, 5 and 1 at most" in text
    assert "1.00 GiB, then 65.0 MiB more" in text
    assert "- speed/a: RuntimeError: no" in text


def test_measured_figures_enter_a_profile(tmp_path):
    found = {
        "facts/versions": {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "total_bytes": 150_000_000_000},
        "facts/context": {"a": 500, "b": 700},
        "facts/speeds": {"bytes_per_second": 4.1e12, "bf16_per_second": 7.9e14},
    }
    before = load_profile("h200", user_dir=tmp_path)
    after = keep.measured(before, found)
    file = tmp_path / "h200.toml"
    file.write_text(keep.format_profile(after))
    assert read_profile(file) == after
    assert (after.total.value, after.total.measured) == (150_000_000_000, True)
    assert (after.context.value, after.dense_bf16.value) == (700, 790_000_000_000_000)
    assert after.nvml_total == before.nvml_total
    assert keep.slug_of(found) == "nvidia-h200-torch-2.11.0"


def test_a_command_that_fails_is_a_failure_with_its_last_words(tmp_path, monkeypatch):
    said = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nModuleNotFoundError: msgspec\n")
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: said)
    journal = Journal(tmp_path, 1)
    work([Unit("fit/doctor", 0.0, commands.doctor)], journal, time.time() + 60, lambda: False)
    row = latest(journal.rows())["fit/doctor"]
    assert row["status"] == FAILED
    assert row["error"].splitlines()[0] == "RuntimeError: exit 1 of doctor --json"
    assert row["error"].endswith("ModuleNotFoundError: msgspec")
    assert journal.done() == set()


def test_a_process_that_dies_before_its_first_unit_is_not_started_again(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    assert measure(command, Journal(tmp_path, 1), time.time() + 60) is False
