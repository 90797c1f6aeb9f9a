"""Damage to checkpoints of the benchmark is caught, and its planted pickles would execute."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from benchmarks.damages import _payloads, damage_checkpoints


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_every_kind_of_damage_is_caught(tmp_path: Path) -> None:
    counts, missed = damage_checkpoints(tmp_path, seed=2, number=16)
    assert missed == []
    assert {"flipped bits", "swaps", "deletions", "planted pickles with right sums"} <= set(counts)
    assert all(set(found) == {"caught"} for found in counts.values())


def test_the_planted_pickles_execute_where_nothing_protects(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"
    for payload in _payloads(sentinel):
        pickle.loads(payload)
        assert sentinel.exists()
        sentinel.rmdir() if sentinel.is_dir() else sentinel.unlink()
