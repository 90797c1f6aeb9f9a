"""The choice of a tuner in a plan, and its studies' names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autobatch import Progress
from autobatch.core.knobs import SearchAxis
from autobatch.core.records import Tuning
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.tuning import tune_plan
from autobatch.tuning.configuration import StudyLocation
from autobatch.tuning.find_fastest import TuningResult
from autobatch.tuning.tune_plan import PlanTuner
from tests.support.options import as_options
from tests.support.probes import Listener
from tests.support.trials import trial_setup

AXES = [SearchAxis("micro_batch_shift", (0, 1)), SearchAxis("precision", ("fp32", "bf16"))]


def tuner_of(home: Path, progress: Progress, budget: str = "1GiB", **fields: Any) -> PlanTuner:
    options = as_options("fit", **{"target_batch": 64, "trials": 1, **fields})
    process = ThisProcess(trial_setup(budget))
    return PlanTuner(process=process, options=options, planned_steps=100, home=home, progress=progress)


def located(home: Path, progress: Progress, budget: str = "1GiB", **fields: Any) -> StudyLocation:
    return tuner_of(home, progress, budget, **fields).locate(AXES)


def test_a_study_follows_the_requested_budget_and_workers_and_not_free_memory(tmp_path: Path) -> None:
    budgets: list[dict[str, Any]] = [{"memory_budget": budget} for budget in (None, "64MiB")]
    names = [
        located(tmp_path, Progress(), free, **asked).name for asked in budgets for free in ("1GiB", "64MiB")
    ]
    assert names[0] == names[1] != names[2] == names[3]
    workers: list[dict[str, Any]] = [{}, {"workers": 0}, {"workers": 2}]
    assert len({located(tmp_path, Progress(), **one).name for one in workers}) == 3


def test_a_study_is_kept_in_the_data_directory_or_else_in_memory_with_a_note(tmp_path: Path) -> None:
    progress = Listener()
    found = located(tmp_path, progress, study="mine")
    assert (found.name, found.storage) == ("mine", str(tmp_path / "studies" / "mine.log"))
    assert not progress.notes
    (tmp_path / "file").touch()
    assert located(tmp_path / "file", progress).storage is None
    assert "is kept in memory" in progress.notes[0]


class TwoRanks(Ranks):
    """Rank 0 of two, the other of which answers with a reason of its own."""

    world = 2

    def __init__(self, reason: str | None) -> None:
        self.reason = reason

    def gather(self, value: Any) -> list[Any]:
        return [value, self.reason if value is None else value]


@pytest.mark.parametrize("reason", [None, "out of memory"])
def test_a_choice_is_taken_only_if_it_runs_on_every_rank(
    reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"optimizer": "foreach", "micro_batch_shift": 1}
    found = Tuning(trials=1, best=best, baseline_samples_per_s=1.0, best_samples_per_s=2.0, study="s")
    monkeypatch.setattr(tune_plan, "find_fastest", lambda *_, **__: TuningResult(found, 4))
    progress = Listener()
    tuner = replace(tuner_of(tmp_path, progress, knobs=",".join(best)), ranks=TwoRanks(reason))
    plan = make_plan(target_batch=20, micro_batch_limit=8, learning_rate=0.1)
    chosen, tuning = tuner.tune(plan, 8)
    if reason is None:
        assert (chosen.knobs, chosen.world_size, chosen.effective_batch) == ({"optimizer": "foreach"}, 2, 20)
        assert [one.micro_batches for one in chosen.ranks] == [[4, 3, 3]] * 2
        assert tuning.best == best
    else:
        assert chosen == plan
        assert (tuning.best["optimizer"], tuning.best_samples_per_s) == ("default", 1.0)
        assert progress.notes == ["kept the plan: the fastest configuration fails on rank 1: out of memory"]
