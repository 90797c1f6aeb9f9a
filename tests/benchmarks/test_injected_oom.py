"""Errors that the benchmark injects reach every part of a run, and each is answered."""

from __future__ import annotations

from pathlib import Path

from benchmarks.injected_oom import inject_everywhere


def test_errors_at_some_operations_are_recovered_from_or_resumed_after(tmp_path: Path) -> None:
    counts, faults = inject_everywhere(tmp_path, stride=97)
    assert faults == []
    assert sum(sum(found.values()) for found in counts.values()) >= 6
    assert len(counts) >= 3
