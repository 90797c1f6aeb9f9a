"""The stage that chooses the split: the plan that results, and failures that end no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autobatch.api import stages
from autobatch.api.context import RunContext
from autobatch.api.pipeline import run as run_command
from autobatch.core.check_options import options_from
from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.progress import Progress
from autobatch.search.sizes.hazards import Obstacle
from tests.support.ragged import CONTRASTIVE, pad, ragged_workload
from tests.support.training import language_model


class Noting(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan(home: Path, workload, **values: Any):
    options = {"target_batch": 24, "device": "cpu", "memory_budget": "2MiB", **values}
    listener = Noting()
    context = RunContext(environ={"AUTOBATCH_HOME": str(home)}, progress=listener)
    return run_command(workload, options_from("plan", options), context), listener.notes


@pytest.mark.parametrize("changes", [{}, {"loss": CONTRASTIVE}])
def test_a_plan_by_size_has_its_rule_and_says_what_it_saves(tmp_path: Path, changes) -> None:
    found, notes = plan(tmp_path, ragged_workload(**changes), split="size")
    assert found.plan.split == "size"
    cut = found.plan.size_cut
    assert cut.padding <= cut.padding_by_count
    assert cut.micro_batches[-1] == min(found.probe.micro_batch, 24)
    assert any("padded ÷ real" in line for line in notes)


def test_a_plan_for_ranks_of_another_loop_is_by_count(tmp_path: Path) -> None:
    found, _ = plan(tmp_path, ragged_workload(), world_size=2)
    assert (found.plan.split, found.plan.size_cut) == ("count", None)
    with pytest.raises(InputError, match="--split size over 2 ranks is for autobatch fit"):
        plan(tmp_path, ragged_workload(), world_size=2, split="size")


def test_a_plan_by_count_stays_as_it_was(tmp_path: Path) -> None:
    found, notes = plan(tmp_path, ragged_workload(), split="count")
    assert (found.plan.split, found.plan.size_cut) == ("count", None)
    assert not any("split" in line for line in notes)


def test_a_hazard_ends_a_run_that_asked_for_it(tmp_path: Path) -> None:
    def mean(model, batch):
        return model(batch[0]).mean()

    with pytest.raises(InputError, match="--split size is not possible"):
        plan(tmp_path, ragged_workload(loss=mean, model=language_model), split="size")


def test_a_choice_that_fails_leaves_a_plan_by_count(tmp_path: Path, monkeypatch) -> None:
    def broken(*_: object):
        raise AutobatchError("the clock stands still")

    monkeypatch.setattr(stages, "choose_split", broken)
    found, notes = plan(tmp_path, ragged_workload())
    assert found.plan.split == "count"
    assert "batches are split by count: the clock stands still" in notes


def test_a_kept_choice_does_not_hide_a_hazard(tmp_path: Path, monkeypatch) -> None:
    plan(tmp_path, ragged_workload(), split="size")
    hazard = Obstacle("a new hazard", is_hazard=True)
    monkeypatch.setattr("autobatch.search.sizes.plan_split.find_obstacle", lambda _: hazard)
    with pytest.raises(InputError, match="a new hazard"):
        plan(tmp_path, ragged_workload(), split="size")


def test_a_micro_batch_that_does_not_run_is_in_no_cut(tmp_path: Path) -> None:
    def at_most_8(samples):
        if len(samples) > 8:
            raise ValueError("at most 8 samples")
        return pad(samples)

    found, _ = plan(tmp_path, ragged_workload(collate=at_most_8), split="size")
    assert (found.probe.micro_batch, found.probe.upper_bound_by) == (8, "error")
    assert max(found.plan.size_cut.micro_batches) == 8
