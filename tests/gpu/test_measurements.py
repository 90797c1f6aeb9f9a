"""The measurements of a GPU that is here for minutes, rehearsed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import keep
from benchmarks.gpu.__main__ import measure
from benchmarks.gpu.recordings import SIZES, record
from benchmarks.gpu.work import DONE, Journal
from benchmarks.published.recordings import read_any, replays_of

pytestmark = pytest.mark.gpu


def test_a_recording_is_stored_and_replayed(tmp_path: Path) -> None:
    replays = record("mlp", tmp_path)["replays"]
    for size, replay in zip(SIZES, replays, strict=True):
        assert replay["same"] == replay["allocations"] > 30
        (again,) = replays_of(read_any(tmp_path / f"mlp-{size}.csv.gz"))
        assert again.agrees


@pytest.mark.slow
def test_facts_and_commands_are_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_GPU_TOTAL_MIB", "81920")  # a real GPU of these measurements has as much
    journal, until = Journal(tmp_path), time.time() + 900
    command = [sys.executable, "-m", "benchmarks.gpu.units", str(tmp_path), "--call", "1"]
    command += ["--until", str(until), "--part", "facts", "record", "fit"]
    assert measure(command, journal, until) is False
    last = journal.latest()
    assert {name: row.get("error") for name, row in last.items() if row["status"] != DONE} == {}
    found = {name: row["found"] for name, row in last.items()}
    assert found["facts/context"]["context"] > 0
    assert [row["exit"] for row in found["fit/demo"].values()] == [0, 0]
    assert found["fit/resume"]["equal"]
    assert keep.keep(tmp_path, tmp_path / "kept", tmp_path, None) == 0
    assert [*(tmp_path / "kept").rglob("gpt-4.csv.gz")]
