"""Attacks of the torture on runs: each is caught, answered in one line or recovered from."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.damages import damage_checkpoints, forge_checkpoints, payloads
from benchmarks.injected_calls import FAILURES, fail_everywhere
from benchmarks.injected_oom import inject_everywhere
from benchmarks.late_memory import LATE, late_runs
from benchmarks.wrong_inputs import MAKERS, ask_all


@pytest.mark.program
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_every_kind_of_damage_is_caught(tmp_path: Path) -> None:
    found = damage_checkpoints(tmp_path, seed=2, number=16)
    assert found.faults == []
    assert {"flipped bits", "swaps", "deletions", "planted pickles with right sums"} <= set(found.counts)


MOMENTS = "state/optimizers/0/state/0/exp_avg"
FORGED_STEPS = {f"{MOMENTS} = {what}" for what in ("longer", "empty", "integers", "nothing")} | {
    "state/optimizers/0/state/0/exp_avg_sq = a number",
    "state/schedules/0/_step_count = []",
}


@pytest.mark.program
def test_state_that_no_step_can_be_taken_with_is_refused_in_one_line(tmp_path: Path) -> None:
    found = forge_checkpoints(tmp_path, places=FORGED_STEPS)
    assert found.faults == []
    assert sum(one["refused"] for one in found.counts.values()) == len(FORGED_STEPS)


@pytest.mark.program
def test_forged_checkpoints_are_passed_over_refused_or_harmless(tmp_path: Path) -> None:
    found = forge_checkpoints(tmp_path, stride=163)
    assert found.faults == []
    assert {*sum(found.counts.values(), Counter())} == {"passed over", "refused", "trained"}


def test_the_planted_pickles_execute_where_nothing_protects(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"
    for payload in payloads(sentinel):
        pickle.loads(payload)
        assert sentinel.exists()
        sentinel.rmdir() if sentinel.is_dir() else sentinel.unlink()


def test_errors_at_some_operations_are_recovered_from_or_resumed_after(tmp_path: Path) -> None:
    found = inject_everywhere(tmp_path, stride=97)
    assert found.faults == []
    assert sum(one.total() for one in found.counts.values()) >= 6
    assert len(found.counts) >= 3


@pytest.mark.program
def test_failing_calls_of_the_system_at_some_points_lose_nothing_and_are_told_in_one_line(
    tmp_path: Path,
) -> None:
    found = fail_everywhere(tmp_path, stride=19)
    assert found.faults == []
    assert len(found.counts) == len(FAILURES) + 2
    assert all("exit 1" in found.counts[kind] for kind in FAILURES)


@pytest.mark.program
def test_memory_that_changes_while_a_run_trains_is_told(tmp_path: Path) -> None:
    found = late_runs(tmp_path, 2, 1)
    assert found.faults == []
    assert {kind: one.total() for kind, one in found.counts.items()} == dict.fromkeys(LATE, 1)


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_sixty_wrong_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    found = ask_all(tmp_path, 60, seed=7)
    assert found.faults == []
    assert {*found.counts} == {make.__name__.removeprefix("wrong_") for make in MAKERS}
