"""Runs whose memory changes while they train are answered as the benchmark expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.late_memory import KEPT, LATE, growing_runs, late_runs

pytestmark = pytest.mark.program


def test_a_run_of_each_kind_is_told_and_exact(tmp_path: Path) -> None:
    for run, kinds in ((growing_runs, KEPT), (late_runs, LATE)):
        counts, faults = run(tmp_path, 2, 1)
        assert faults == []
        assert {kind: sum(found.values()) for kind, found in counts.items()} == dict.fromkeys(kinds, 1)
