"""The choice of a tuner in a plan, and its studies' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autobatch.core.knobs import SearchAxis
from autobatch.core.progress import Progress
from autobatch.core.records import LrTuning, Tuning
from autobatch.planning import make_plan
from autobatch.probing.child import ThisProcess
from autobatch.tuning.configuration import Measurement
from autobatch.tuning.find_fastest import StudyLocation, TuningResult
from autobatch.tuning.tune_plan import PlanTuner, TuneSettings, with_choice, with_learning_rate
from tests.support.trials import trial_setup

AXES = [SearchAxis("micro_batch_shift", (0, 1)), SearchAxis("precision", ("fp32", "bf16"))]


class Notes(Progress):
    """Progress that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def result(best: dict[str, Any], micro_batch: int) -> TuningResult:
    tuning = Tuning(trials=1, best=best, baseline_samples_per_s=1.0, best_samples_per_s=2.0, study="s")
    return TuningResult(tuning, Measurement(2.0, micro_batch))


def test_a_choice_changes_the_split_and_the_precision_but_not_the_batch() -> None:
    plan = make_plan(target_batch=20, micro_batch_limit=8, learning_rate=0.1)
    assert plan.micro_batches == [7, 7, 6]
    chosen = with_choice(plan, result({"micro_batch_shift": 1, "precision": "bf16"}, 4), AXES)
    assert (chosen.micro_batches, chosen.micro_batch, chosen.accumulation_steps) == ([4] * 5, 4, 5)
    assert (chosen.precision, chosen.knobs, chosen.effective_batch) == ("bf16", {}, 20)


def test_the_default_leaves_the_plan_unchanged() -> None:
    plan = make_plan(target_batch=20, micro_batch_limit=8, learning_rate=0.1)
    assert with_choice(plan, result({"micro_batch_shift": 0, "precision": "fp32"}, 7), AXES) is plan


def test_a_kept_learning_rate_leaves_the_plan_unchanged() -> None:
    plan = make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1)
    stays = LrTuning(trials=1, steps=4, default=0.1, best=0.1, default_loss=1.0, best_loss=1.0, study="s")
    assert with_learning_rate(plan, stays, declared=0.1) is plan


def test_a_better_learning_rate_is_put_into_the_plan_with_its_factor() -> None:
    plan = make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1)
    found = LrTuning(trials=3, steps=4, default=0.1, best=0.4, default_loss=1.0, best_loss=0.5, study="s")
    chosen = with_learning_rate(plan, found, declared=0.05)
    assert (chosen.learning_rate, chosen.learning_rate_rule) == (0.4, "tuned")
    assert chosen.learning_rate_factor == pytest.approx(8)


def tuner_of(home: Path, progress: Progress, budget: str = "1GiB", **fields: Any) -> PlanTuner:
    settings = TuneSettings(trials=1, planned_steps=100, cap=64, **fields)
    process = ThisProcess(trial_setup(budget))
    return PlanTuner(process=process, settings=settings, home=home, progress=progress)


def located(home: Path, progress: Progress, budget: str = "1GiB", **fields: Any) -> StudyLocation:
    return tuner_of(home, progress, budget, **fields).locate(AXES)


def test_a_study_follows_the_requested_budget_and_not_free_memory(tmp_path: Path) -> None:
    budgets: list[dict[str, Any]] = [{"asked": {"memory_budget": budget}} for budget in (None, "64MiB")]
    names = [
        located(tmp_path, Progress(), free, **asked).name for asked in budgets for free in ("1GiB", "64MiB")
    ]
    assert names[0] == names[1] != names[2] == names[3]


def test_the_study_of_learning_rates_has_another_name_in_the_same_storage(tmp_path: Path) -> None:
    given = {"study": "mine", "storage": "journal.log", "lr_steps": 8, "lr_trials": 2}
    tuner = tuner_of(tmp_path, Progress(), **given)
    plan = make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1)
    place = tuner._locate_lr(tuner.settings.lr_trial_spec(plan))
    assert (place.name, place.storage) == ("mine-learning-rate", "journal.log")
    assert (place.made_for["learning_rate"], place.made_for["lr_steps"]) == (0.1, 8)
    assert (tuner.locate(AXES).name, tuner.locate(AXES).storage) == ("mine", "journal.log")


def test_each_number_of_workers_has_its_own_study(tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [{}, {"workers": 0}, {"workers": 2}]
    assert len({located(tmp_path, Progress(), **one).name for one in fields}) == 3


def test_a_study_is_kept_in_the_data_directory_or_else_in_memory_with_a_note(tmp_path: Path) -> None:
    progress = Notes()
    found = located(tmp_path, progress, study="mine")
    assert (found.name, found.storage) == ("mine", str(tmp_path / "studies" / "mine.log"))
    assert not progress.notes
    (tmp_path / "file").touch()
    assert located(tmp_path / "file", progress).storage is None
    assert "is kept in memory" in progress.notes[0]
