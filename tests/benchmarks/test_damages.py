"""Damage to checkpoints of the benchmark is caught, and its planted pickles would execute."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from benchmarks.damages import _payloads, damage_checkpoints, forge_checkpoints


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_every_kind_of_damage_is_caught(tmp_path: Path) -> None:
    counts, missed = damage_checkpoints(tmp_path, seed=2, number=16)
    assert missed == []
    assert {"flipped bits", "swaps", "deletions", "planted pickles with right sums"} <= set(counts)
    assert all(set(found) == {"caught"} for found in counts.values())


FORGED_STEPS = {f"optimizer/0/exp_avg/0.weight {what}" for what in ("longer", "empty", "integers")} | {
    "optimizers/0/state/$dict/1/1/exp_avg = nothing",
    "optimizers/0/state/$dict/1/1/exp_avg_sq = -1",
    "schedules/0/_step_count = []",
}


def test_state_that_no_step_can_be_taken_with_is_refused_in_one_line(tmp_path: Path) -> None:
    counts, faults = forge_checkpoints(tmp_path, places=FORGED_STEPS)
    assert faults == []
    assert sum(found["refused"] for found in counts.values()) == len(FORGED_STEPS)


@pytest.mark.program
def test_forged_checkpoints_are_passed_over_refused_or_harmless(tmp_path: Path) -> None:
    counts, faults = forge_checkpoints(tmp_path, stride=163)
    assert faults == []
    assert {outcome for found in counts.values() for outcome in found} == {
        "passed over",
        "refused",
        "trained",
    }


def test_the_planted_pickles_execute_where_nothing_protects(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"
    for payload in _payloads(sentinel):
        pickle.loads(payload)
        assert sentinel.exists()
        sentinel.rmdir() if sentinel.is_dir() else sentinel.unlink()
