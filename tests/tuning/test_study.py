"""Studies: the order of trials, their stored results, resuming and sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autobatch.core.errors import InputError
from autobatch.core.knobs import Configuration, defaults
from autobatch.tuning.configuration import (
    LOSS,
    MEMORY,
    LogRange,
    Measurement,
    MedianStop,
    all_configurations,
    infeasible,
    key_of,
)
from tests.support.studies import (
    AXES,
    SMALL_AXES,
    CountingMeasure,
    exact,
    make_study,
    open_journal,
    search,
    speed_of,
)


def test_an_infeasible_trial_is_complete_and_never_chosen(tmp_path: Path) -> None:
    def with_limits(values: Configuration) -> Measurement:
        if values["precision"] == "bf16":
            return infeasible(LOSS, "its losses differ from the reference", over=0.3)
        if values["checkpointing"] == "full":
            return infeasible(MEMORY, "out of memory")
        return exact(values)

    found = search(with_limits, trials=16, storage=str(tmp_path / "s.log")).tuning
    assert found.best["precision"] == "fp32"
    refusals = [one for one in found.history if not one.feasible]
    assert not found.notes
    assert {one.note for one in refusals} == {"its losses differ from the reference", "out of memory"}
    assert all(one.samples_per_s is None for one in refusals)
    trials = open_journal(tmp_path / "s.log").trials
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    feasible = [trial.value for trial in trials if trial.user_attrs["failure"] is None]
    for trial in trials:
        if trial.user_attrs["failure"] is not None:
            assert max(trial.constraints.values()) > 0
            assert trial.value >= min(feasible) or trial.value == min(t.value for t in trials)
            name, value = max(trial.user_attrs["constraints"].items(), key=lambda item: item[1])
            assert trial.constraints == {name: value}
        else:
            assert trial.value == pytest.approx(trial.user_attrs["samples_per_s"])


def test_a_study_resumes_where_it_stopped(tmp_path: Path) -> None:
    storage = str(tmp_path / "deep" / "s.log")
    first = search(trials=5, storage=storage).tuning
    measure = CountingMeasure()
    second = search(measure, trials=12, storage=storage).tuning
    assert second.history[:5] == first.history
    assert second.trials == 12
    fresh = [key_of(one.parameters) for one in second.history[5:]]
    assert not set(fresh) & {key_of(one.parameters) for one in first.history}
    # The default is measured again at the start, and every few trials.
    asked = [values for values in measure.asked[:9] if values != defaults(AXES)]
    assert measure.asked[0] == defaults(AXES)
    assert [key_of(values) for values in asked] == fresh
    third = CountingMeasure()
    assert search(third, trials=12, storage=storage).tuning.best == second.best
    # Only the best ones, simpler ones and the default are measured.
    best = sorted(second.history, key=lambda one: -(one.relative or 0.0))[0]
    simpler = sum(best.parameters[name] != value for name, value in defaults(AXES).items())
    assert len({key_of(values) for values in third.asked}) <= 4 + simpler


def test_a_dashboard_sees_samples_per_second_by_name(tmp_path: Path) -> None:
    search(trials=4, storage=str(tmp_path / "s.log"))
    study = open_journal(tmp_path / "s.log")
    assert study.metric_names == ["samples per second"]
    assert study.trials[0].value == pytest.approx(speed_of(defaults(AXES)))


def test_repeats_take_over_the_known_result(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    search(trials=6, storage=storage)
    study = open_journal(tmp_path / "s.log")
    study.enqueue_trial(defaults(AXES))
    measure = CountingMeasure()
    found = search(measure, trials=9, storage=storage).tuning
    assert found.trials == 9
    assert measure.asked[0] == defaults(AXES)  # of today
    assert defaults(AXES) not in measure.asked[1:4]
    repeated = [trial for trial in open_journal(tmp_path / "s.log").trials if "reused" in trial.user_attrs]
    assert [trial.user_attrs["reused"] for trial in repeated][:1] == [0]
    assert repeated[0].value == pytest.approx(1000)


def test_a_storage_that_fails_during_the_search_gives_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    def measure(values: Configuration) -> Measurement:
        monkeypatch.setattr(optuna.Study, "tell", gone)
        return exact(values)

    with pytest.raises(InputError, match=r"memory of the study cannot be written: OSError: .*Input/output"):
        search(measure)


def test_two_processes_never_try_the_same_point(tmp_path: Path) -> None:
    """Each point of the space is given to one of them, until none is left."""
    studies = [make_study(SMALL_AXES, storage=str(tmp_path / "s.log"), seed=seed) for seed in range(2)]
    given = []
    for number in range(8):
        request = studies[number % 2].ask()
        assert request is not None
        assert request.known is None
        given.append(key_of(request.values))
    assert sorted(given) == sorted(key_of(values) for values in all_configurations(SMALL_AXES))
    assert [study.ask() for study in studies] == [None, None]
    assert studies[0].num_taken() == 8


def test_an_infeasible_result_is_stored_as_the_worst_so_far(tmp_path: Path) -> None:
    study = make_study(LogRange("x", 1.0, 2.0), direction="minimize", storage=str(tmp_path / "s.log"))
    for figure in (5.0, 3.0, 1e9, 4.0):
        request = study.ask()
        assert request is not None
        study.tell(request, figure)
    assert [trial.value for trial in open_journal(tmp_path / "s.log").trials] == [5.0, 3.0, 5.0, 4.0]


def test_a_trial_is_stopped_once_it_is_worse_than_the_median() -> None:
    rule = MedianStop(startup_trials=2, warmup_steps=2)
    study = make_study(LogRange("x", 1.0, 2.0), direction="minimize", early_stop=rule)
    stopped = []
    for losses in ((3.0, 2.0, 1.0), (5.0, 4.0, 3.0), (9.0, 9.0, 1.9), (9.0, 9.0, 2.1)):
        request = study.ask()
        assert request is not None
        stopped.append([study.should_stop(request, step, loss) for step, loss in enumerate(losses, 1)])
        study.tell(request, losses[-1])
    # The medians of the last step are 2.0 of two trials, then 1.9 of three.
    assert stopped == [[False] * 3, [False] * 3, [False, True, False], [False, True, True]]
