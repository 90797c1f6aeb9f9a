"""The measurements on a GPU: their journal, their process and their table."""

from __future__ import annotations

import sys
import time

import pytest

from autobatch.device.profiles import load_profile, read_profile
from benchmarks.gpu import keep
from benchmarks.gpu.__main__ import measure
from benchmarks.gpu.work import BEGUN, CUT, DONE, FAILED, FILE, LOST, Journal, Unit, work


def units(ran, *names):
    def run(name):
        ran.append(name)
        if "bad" in name:
            raise ValueError(f"{name} broke")
        return {"name": name}

    return [Unit(name, 0.0, lambda name=name: run(name)) for name in names]


def test_a_dying_process_leaves_the_rows_before_it(tmp_path):
    journal = Journal(tmp_path)
    journal.write("a/1", BEGUN)
    journal.write("a/1", DONE, found={"x": 1})
    journal.write("a/2", BEGUN)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"call": 1, "unit": "a/2", "sta')
    assert [row["status"] for row in journal.rows()] == [BEGUN, DONE, BEGUN]
    assert journal.unfinished()["unit"] == "a/2"
    assert Journal(tmp_path).call == 2
    assert Journal(tmp_path).unfinished() is None


def test_failures_and_lost_contexts_do_not_keep_other_units_from_being_measured(tmp_path):
    ran, until = [], time.time() + 60
    given = units(ran, "a/1", "a/bad")
    assert work(given, Journal(tmp_path), until, lambda: False) == 0
    failed = Journal(tmp_path).latest()["a/bad"]
    assert (failed["status"], failed["error"]) == (FAILED, "ValueError: a/bad broke")
    given += units(ran, "b/1", "b/2")
    journal = Journal(tmp_path)
    assert work(given, journal, until, lambda: True) == LOST
    assert work(given, journal, until, lambda: False) == 0
    assert ran == ["a/1", "a/bad", "b/1", "b/2", "a/bad"], "what was never tried comes first"


BEGINS = (
    "import os, subprocess, sys, time; from pathlib import Path; from benchmarks.gpu.work import *;"
    "folder = Path(sys.argv[1]); Journal(folder, 1).write('a/1', BEGUN);"
)


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (BEGINS + "os._exit(5)", FAILED, "the process ended with 5"),
        (BEGINS.replace("BEGUN)", "BEGUN, until=time.time())") + "time.sleep(600)", CUT, "it took too long"),
    ],
)
def test_the_unit_in_which_a_process_died_or_hung_is_told(tmp_path, code, status, error):
    journal = Journal(tmp_path)
    assert measure([sys.executable, "-c", code, str(tmp_path)], journal, time.time() + 60) is True
    assert journal.rows()[-1] == {"call": 1, "unit": "a/1", "status": status, "error": error}


def test_measured_figures_enter_a_profile(tmp_path):
    found = {
        "facts/versions": {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "total_bytes": 150_000_000_000},
        "facts/context": {"a": 500, "b": 700},
    }
    journal, before = Journal(tmp_path), load_profile("h200")
    for unit, row in found.items():
        journal.write(unit, DONE, found=row)
    file = tmp_path / "h200.toml"
    file.write_text(keep.format_profile(before))
    assert read_profile(file) == before
    (tmp_path / "gpt-4.csv.gz").write_bytes(b"recorded")
    assert keep.keep(tmp_path, tmp_path / "kept", tmp_path, file) == 0
    after = read_profile(file)
    assert (after.total.value, after.total.measured) == (150_000_000_000, True)
    assert after.context.value == 700
    assert (tmp_path / "kept/nvidia-h200-torch-2.11.0/gpt-4.csv.gz").exists()
