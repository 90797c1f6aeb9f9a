"""The measurements of a GPU that is here for minutes, rehearsed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from autobatch.device.allocator.trace import FREE
from benchmarks.gpu import claims, keep
from benchmarks.gpu.__main__ import measure
from benchmarks.gpu.journal import DONE, Journal, latest
from benchmarks.gpu.plan import units_of
from benchmarks.gpu.recordings import mismatches

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_facts_and_commands_are_measured_and_kept(tmp_path: Path) -> None:
    journal, until = Journal(tmp_path, 1), time.time() + 900
    command = [sys.executable, "-m", "benchmarks.gpu.work", "--out", str(tmp_path), "--call", "1"]
    command += ["--until", str(until), "--part", "facts", "fit"]
    assert measure(command, journal, until) is False
    last = latest(journal.rows())
    assert {name: row.get("error") for name, row in last.items() if row["status"] != DONE} == {}
    found = {name: row["found"] for name, row in last.items()}
    assert found["facts/cap"]["fixed"]["pieces"] == 50
    assert found["facts/sessions"]["reserved_bytes"] == [0, 0, 0]
    assert found["facts/golden"]["mismatches"] == 0
    assert [row["exit"] for row in found["fit/demo"].values()] == [0, 0]
    assert found["fit/resume"]["equal"]
    assert "equal weights" in claims.table(journal.rows())
    kept = keep.keep_fixtures(tmp_path, tmp_path / "kept", "a")
    assert mismatches(keep.read_golden(kept[0])) == []
    traced = keep.read_traces(kept[1])["gpt", "bf16"]
    assert all(any(size == FREE for _, size in events) for events in traced.values())


def test_every_unit_has_its_own_name_and_room(tmp_path: Path) -> None:
    names = [unit.name for unit in units_of(tmp_path)]
    assert len(set(names)) == len(names)
