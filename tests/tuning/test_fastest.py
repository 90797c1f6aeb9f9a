"""The search for the fastest configuration, its study, and its place in a plan."""

from __future__ import annotations

import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from autobatch.core.errors import Infeasible
from autobatch.core.records import Tuning
from autobatch.distributed.ranks import Ranks
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.tuning import fastest
from autobatch.tuning.fastest import Knob, Tuner, defaults
from tests.support.options import as_options
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.trials import AXES, FakeTrials, open_journal, search, speed_of, study_in, trial_setup

DEFAULT = defaults(AXES)
SHIFTS = AXES[:1]


def test_the_fastest_is_found_one_change_at_a_time_from_the_default() -> None:
    trials = FakeTrials()
    tuning = search(trials)
    assert tuning.best == {**DEFAULT, "micro_batch_shift": 1, "precision": "bf16", "optimizer": "fused"}
    assert tuning.changes == {"micro_batch_shift": 1, "precision": "bf16", "optimizer": "fused"}
    assert (tuning.baseline_samples_per_s, tuning.low) == (1000.0, pytest.approx(1.1 * 1.5 * 1.06))
    assert tuning.best_samples_per_s == pytest.approx(speed_of(tuning.best))
    tried = [trial.parameters for trial in tuning.history]
    assert (tried[0], trials.asked[0], tuning.trials) == (DEFAULT, {}, len(tried))
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
        noisy = FakeTrials(lambda values: speeds[values.get("i", 0)] * math.exp(draw.gauss(0, 0.05)))  # noqa: B023
        chosen = speeds[search(noisy, [Knob("i", tuple(range(6)))], budget=6).best["i"]]  # type: ignore[index]
        slower += chosen < 1.0
        gained += chosen > 1.0
    assert slower == 0
    assert gained > 5


def test_what_changes_numbers_is_offered_beside_the_choice_while_there_is_time() -> None:
    offers = search(knobs=SHIFTS, offers=AXES[1:]).offers
    assert offers[1].endswith("at least 1.06 × faster here: add --knobs micro_batch_shift,optimizer")
    trials = FakeTrials()
    late = search(trials, SHIFTS, offers=AXES[1:], deadline=0.0)
    assert late.offers == []
    assert "time for tuning (--timeout) was over after 0 of" in late.notes[0]
    assert trials.asked == [{}]


@pytest.mark.parametrize("reason", [None, "full"])
def test_the_default_is_kept(reason: str | None) -> None:
    def speed(values: Any) -> float:
        if reason and not values:
            raise Infeasible(reason)
        return 10.0

    tuning = search(FakeTrials(speed), SHIFTS)
    assert (tuning.best, tuning.changes, tuning.low) == ({"micro_batch_shift": 0}, {}, None)
    assert tuning.best_samples_per_s == tuning.baseline_samples_per_s
    assert (reason or "") in "".join(tuning.notes)


def test_a_search_goes_on_with_the_trials_of_an_earlier_one(tmp_path: Path) -> None:
    """The machine has become five times slower, which changes no ratio."""
    first = search(knobs=SHIFTS, budget=2, home=tmp_path)
    second = search(FakeTrials(lambda values: speed_of(values) / 5), SHIFTS, home=tmp_path)
    assert second.history[:2] == first.history
    assert (second.best, second.low) == ({"micro_batch_shift": 1}, pytest.approx(1.1))
    assert second.baseline_samples_per_s == 200.0


@pytest.mark.parametrize("error", [Infeasible, TypeError, KeyboardInterrupt])
def test_an_error_of_a_trial_closes_it_and_keeps_the_others(tmp_path: Path, error: Any) -> None:
    def speed(values: Any) -> float:
        if values.get("micro_batch_shift") == 1:
            raise error("of the workload")
        return speed_of(values)

    trials = FakeTrials(speed)
    if error is Infeasible:
        found = search(trials, SHIFTS, home=tmp_path)
        assert found.best == {"micro_batch_shift": 0}
        assert [trial.note for trial in found.history if trial.note] == ["of the workload"]
    else:
        with pytest.raises(error, match="of the workload"):
            search(trials, SHIFTS, home=tmp_path)
    states = [trial.state for trial in open_journal(tmp_path).trials]
    assert states[:2] == [TrialState.COMPLETE, TrialState.PRUNED if error is Infeasible else TrialState.FAIL]


def search_through_kills(home: Path) -> tuple[int, Any, list[Any]]:
    """Search in processes each of which is killed in a later trial than the one before, until one ends."""
    kills = 0
    while child := os.fork():
        status = os.waitpid(child, 0)[1]
        if status != signal.SIGKILL:
            found = search(knobs=AXES[:2], budget=8, home=home)
            return kills, found.best, [trial.parameters for trial in found.history]
        kills += 1
    left = [10 + 8 * kills]

    def speed(values: Any) -> float:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return speed_of(values)

    try:
        search(FakeTrials(speed), AXES[:2], budget=8, home=home)
    finally:
        os._exit(0)


def test_a_search_that_is_killed_in_its_trials_keeps_the_others(server: RankServer, tmp_path: Path) -> None:
    ((kills, best, history),) = server.values(search_through_kills, tmp_path, world=1)
    assert kills >= 2
    assert speed_of(best) == max(map(speed_of, history))


def test_a_study_follows_the_requested_budget_and_not_free_memory(tmp_path: Path) -> None:
    def name(home: Path = tmp_path, **fields: Any) -> str:
        return study_in(home, trial_setup(fields.get("memory_budget", "1GiB")), **fields).study_name

    assert name() == name() != name(memory_budget="64MiB")
    assert name() != name(max_micro_batch=4)
    (tmp_path / "file").touch()
    assert name(tmp_path / "file") == name()  # kept in memory


class TwoRanks(Ranks):
    """Rank 0 of two, the other of which answers with a reason of its own."""

    world = 2

    def __init__(self, reason: str | None) -> None:
        self.reason = reason

    def gather(self, value: Any) -> list[Any]:
        return [value, self.reason or value]


@pytest.mark.parametrize("reason", [None, "out of memory"])
def test_a_choice_is_taken_only_if_it_runs_on_every_rank(
    reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"optimizer": "foreach", "micro_batch_shift": 1}
    chosen = Tuning(trials=1, changes=changed, best=changed, best_samples_per_s=2.0, low=1.5)
    monkeypatch.setattr(fastest.Search, "find", lambda _: chosen)
    process, progress = ThisProcess(trial_setup()), Listener()
    options = as_options("fit", target_batch=64, trials=1, knobs=",".join(changed))
    tuner = Tuner(process=process, options=options, planned_steps=100, home=tmp_path, progress=progress)
    plan = make_plan(target_batch=20, micro_batch_limit=8, world_size=2, learning_rate=0.1)
    planned, tuning = replace(tuner, ranks=TwoRanks(reason)).tune(plan)
    if reason is None:
        assert (planned.knobs, planned.effective_batch) == ({"optimizer": "foreach"}, 20)
        assert (planned.micro_batches, tuning) == ([2] * 5, chosen)
    else:
        assert (planned, tuning.changes, tuning.low) == (plan, {}, None)
        assert reason in progress.notes[0]
