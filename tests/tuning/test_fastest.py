"""The search for the fastest configuration, and its place in a plan."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from autobatch import AutobatchError
from autobatch.core.errors import Infeasible
from autobatch.core.knobs import SearchAxis, defaults
from autobatch.core.records import Tuning
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.tuning import fastest
from autobatch.tuning.fastest import Answer, Tuner
from tests.support.options import as_options
from tests.support.probes import Listener
from tests.support.trials import AXES, FakeTrials, open_journal, search, speed_of, trial_setup

DEFAULT = defaults(AXES)
SHIFTS = AXES[:1]
FASTEST = {"micro_batch_shift": 1, "precision": "bf16", "checkpointing": "none", "optimizer": "fused"}


def test_the_fastest_is_found_one_change_at_a_time_from_the_default() -> None:
    trials = FakeTrials()
    tuning, micro_batch = search(trials)
    assert (tuning.best, micro_batch) == (FASTEST, 32)
    assert tuning.changes == {"micro_batch_shift": 1, "precision": "bf16", "optimizer": "fused"}
    assert (tuning.baseline_samples_per_s, tuning.low) == (1000.0, pytest.approx(1.1 * 1.5 * 1.06))
    assert tuning.best_samples_per_s == pytest.approx(speed_of(FASTEST))
    tried = [trial.parameters for trial in tuning.history]
    assert tried[0] == DEFAULT == trials.asked[0]
    assert tuning.trials == len(tried) == len({str(values) for values in tried})
    # Each of the first trials changes one knob of the best before it.
    best = DEFAULT
    for trial in tuning.history[1:8]:
        assert sum(trial.parameters[name] != value for name, value in best.items()) == 1
        best = trial.parameters if trial.is_faster else best
    assert [trial.relative for trial in tuning.history] == pytest.approx(
        [speed_of(values) / 1000 for values in tried]
    )


def test_on_a_noisy_machine_nothing_slower_is_chosen() -> None:
    slower = gained = 0
    for seed in range(25):
        draw = random.Random(seed)
        speeds = [1.0, *(math.exp(draw.gauss(-0.03, 0.1)) for _ in range(5))]
        noisy = FakeTrials(lambda values: speeds[values["i"]] * math.exp(draw.gauss(0, 0.05)))  # noqa: B023
        chosen = speeds[search(noisy, [SearchAxis("i", tuple(range(6)))], budget=6).tuning.best["i"]]  # type: ignore[index]
        slower += chosen < 1.0
        gained += chosen > 1.0
    assert slower == 0
    assert gained > 5


def test_what_changes_numbers_is_offered_and_not_chosen() -> None:
    found = search(axes=SHIFTS, offers=AXES[1:]).tuning
    assert found.best == {"micro_batch_shift": 1}
    assert found.offers == [
        "bf16 is at least 1.50 × faster here: add --precision bf16",
        "fused optimizer is at least 1.06 × faster here: add --knobs micro_batch_shift,optimizer",
    ]


def test_nothing_more_is_measured_once_the_time_is_over() -> None:
    trials = FakeTrials()
    found = search(trials, SHIFTS, offers=AXES[1:], expired=lambda: True).tuning
    assert found.offers == []
    assert not any("precision" in values for values in trials.asked)


def fails_at_default(values: Any) -> float:
    if values == defaults(SHIFTS):
        raise Infeasible("full")
    return speed_of(values)


@pytest.mark.parametrize(
    ("speed", "note"),
    [(lambda _: 10.0, None), (fails_at_default, "could not be measured: full")],
)
def test_the_default_is_kept(speed: Any, note: str | None) -> None:
    tuning, micro_batch = search(FakeTrials(speed), SHIFTS)
    assert (tuning.best, tuning.changes, tuning.low, micro_batch) == ({"micro_batch_shift": 0}, {}, None, 0)
    assert tuning.best_samples_per_s == tuning.baseline_samples_per_s
    assert (note or "") in "".join(tuning.notes)


def test_the_best_that_fails_in_the_end_is_not_chosen() -> None:
    class Full(FakeTrials):
        def confirm(self, values: Any) -> int:
            if len(self.asked) > 20 and values["micro_batch_shift"] == 1:
                raise Infeasible("too big")
            return 1

    tuning, micro_batch = search(Full(), SHIFTS)
    assert (tuning.best, micro_batch) == ({"micro_batch_shift": 0}, 0)
    assert tuning.notes == ["kept the default: the fastest configuration fails: too big"]


def test_a_search_goes_on_with_the_trials_of_an_earlier_one(tmp_path: Path) -> None:
    """The machine has become five times slower, which changes no ratio."""
    storage = str(tmp_path / "deep" / "s.log")
    first = search(axes=SHIFTS, budget=2, storage=storage).tuning
    again = FakeTrials(lambda values: speed_of(values) / 5)
    second = search(again, SHIFTS, budget=20, storage=storage).tuning
    assert second.history[:2] == first.history
    assert (second.best, second.low) == ({"micro_batch_shift": 1}, pytest.approx(1.1))
    assert second.baseline_samples_per_s == 200.0
    trials = len(open_journal(tmp_path / "deep" / "s.log").trials)
    search(axes=SHIFTS, budget=trials, storage=storage)
    assert len(open_journal(tmp_path / "deep" / "s.log").trials) == trials


def test_an_infeasible_configuration_is_kept_with_its_reason(tmp_path: Path) -> None:
    def speed(values: Any) -> float:
        if values["micro_batch_shift"] == 1:
            raise Infeasible("out of memory")
        return speed_of(values)

    found = search(FakeTrials(speed), SHIFTS, storage=str(tmp_path / "s.log")).tuning
    assert {trial.note: trial.relative for trial in found.history if trial.note} == {"out of memory": None}
    assert found.best == {"micro_batch_shift": 0}
    states = {
        trial.params["micro_batch_shift"]: trial.state for trial in open_journal(tmp_path / "s.log").trials
    }
    assert states[1] is TrialState.PRUNED


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_an_error_of_a_trial_closes_it_and_keeps_the_others(tmp_path: Path, error: Any) -> None:
    def speed(values: Any) -> float:
        if values["micro_batch_shift"] == 2:
            raise error("of the workload")
        return speed_of(values)

    storage = str(tmp_path / "s.log")
    with pytest.raises(error, match="of the workload"):
        search(FakeTrials(speed), SHIFTS, storage=storage)
    states = [trial.state for trial in open_journal(tmp_path / "s.log").trials]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL]


def test_a_storage_that_fails_in_the_middle_is_an_error_of_one_line(tmp_path: Path) -> None:
    def speed(values: Any) -> float:
        (tmp_path / "s.log").unlink(missing_ok=True)
        return 1.0

    with pytest.raises(AutobatchError, match="FileNotFoundError") as found:
        search(FakeTrials(speed), SHIFTS, storage=str(tmp_path / "s.log"))
    assert (found.value.exit_code, str(found.value).isprintable()) == (1, True)


@pytest.mark.parametrize(("run_share", "trials"), [(math.inf, 4), (0.25, 1)])
def test_a_short_run_is_not_tuned_for_long(
    run_share: float, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run takes 6.4 s at 1,000 samples a second, and each measurement a second."""
    trial_list = FakeTrials()
    monkeypatch.setattr(fastest.time, "monotonic", lambda: float(len(trial_list.asked)))
    found = search(trial_list, SHIFTS, budget=4, run_share=run_share).tuning
    assert found.trials >= trials
    assert bool(found.notes) == (run_share == 0.25)


# In a plan.


def tuner_of(home: Path, progress: Listener, **fields: Any) -> Tuner:
    options = as_options("fit", **{"target_batch": 64, "trials": 1, **fields})
    process = ThisProcess(trial_setup(fields.get("memory_budget", "1GiB")))
    return Tuner(process=process, options=options, planned_steps=100, home=home, progress=progress)


def test_a_study_follows_the_requested_budget_and_not_free_memory(tmp_path: Path) -> None:
    def name(**fields: Any) -> str:
        tuner = tuner_of(tmp_path, Listener(), **fields)
        return tuner.open_study({}, {}, direction="maximize", metric="speed").name

    assert name() == name() != name(memory_budget="64MiB")
    assert name() != name(max_micro_batch=4)
    assert [path.suffix for path in (tmp_path / "studies").iterdir()].count(".log") == 3


def test_a_study_is_kept_in_memory_if_the_data_directory_is_not_writable(tmp_path: Path) -> None:
    progress = Listener()
    (tmp_path / "file").touch()
    tuner_of(tmp_path / "file", progress).open_study({}, {}, direction="maximize", metric="speed")
    assert "is kept in memory" in progress.notes[0]


class TwoRanks(Ranks):
    """Rank 0 of two, the other of which answers with a reason of its own."""

    world = 2

    def __init__(self, reason: str | None) -> None:
        self.reason = reason

    def gather(self, value: Any) -> list[Any]:
        _, micro_batch = value
        return [value, (self.reason, micro_batch)]


@pytest.mark.parametrize("reason", [None, "out of memory"])
def test_a_choice_is_taken_only_if_it_runs_on_every_rank(
    reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"optimizer": "foreach", "micro_batch_shift": 1}
    found = Tuning(trials=1, best=best, baseline_samples_per_s=1.0, best_samples_per_s=2.0, low=1.5)
    monkeypatch.setattr(fastest.Search, "find", lambda _: Answer(found, 4))
    progress = Listener()
    tuner = replace(tuner_of(tmp_path, progress, knobs=",".join(best)), ranks=TwoRanks(reason))
    plan = make_plan(target_batch=20, micro_batch_limit=8, world_size=2, learning_rate=0.1)
    chosen, tuning = tuner.tune(plan)
    if reason is None:
        assert (chosen.knobs, chosen.world_size, chosen.effective_batch) == ({"optimizer": "foreach"}, 2, 20)
        assert chosen.micro_batches == [4, 3, 3]
        assert tuning.best == best
    else:
        assert chosen == plan
        assert (tuning.best["optimizer"], tuning.best_samples_per_s, tuning.low) == ("default", 1.0, None)
        assert progress.notes == ["kept the plan: the fastest configuration fails on rank 1: out of memory"]
