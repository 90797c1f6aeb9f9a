"""Errors that the benchmark injects reach every part of a run, and each is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.injected_calls import FAILURES, fail_everywhere
from benchmarks.injected_oom import inject_everywhere


def test_errors_at_some_operations_are_recovered_from_or_resumed_after(tmp_path: Path) -> None:
    counts, faults = inject_everywhere(tmp_path, stride=97)
    assert faults == []
    assert sum(sum(found.values()) for found in counts.values()) >= 6
    assert len(counts) >= 3


@pytest.mark.program
def test_failing_calls_of_the_system_at_some_points_lose_nothing_and_are_told_in_one_line(
    tmp_path: Path,
) -> None:
    counts, faults = fail_everywhere(tmp_path, stride=19)
    assert faults == []
    assert len(counts) == len(FAILURES) + 2
    assert all("exit 1" in counts[kind] for kind in FAILURES)
