"""The loop of a study: until every trial ran, every point was tried, or the time is over."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from optuna.trial import TrialState

from autobatch.core.knobs import Configuration, defaults
from autobatch.tuning.configuration import LogRange, Measurement
from autobatch.tuning.run_study import run_study
from tests.support.studies import AXES, SMALL_AXES, make_study, open_journal, search


def test_a_range_is_searched_between_its_bounds_from_the_first_point() -> None:
    study = make_study(LogRange("x", 0.01, 100.0), direction="minimize", trials=20)
    run_study(
        study,
        lambda request: abs(math.log(float(request.values["x"] or 1.0) / 3)),
        trials=20,
        is_expired=lambda: False,
        on_trial=lambda *_: None,
    )
    found = {float(one.values["x"] or 0.0): one.result for one in study.finished()}
    assert len(found) == 20
    assert next(iter(found)) == 100.0
    assert all(0.01 <= x <= 100.0 for x in found)
    assert min(found.values()) < 0.5


def test_an_interrupted_trial_is_closed_and_tried_again(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")

    def interrupted(values: Configuration) -> Measurement:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, storage=storage)
    assert [trial.state for trial in open_journal(tmp_path / "s.log").trials] == [TrialState.FAIL]
    found = search(storage=storage).tuning
    assert found.history[0].parameters == defaults(AXES)


def test_the_loop_ends_with_the_trials_the_points_or_the_time() -> None:
    for trials, expired_after, expected in ((5, 99, 5), (99, 99, 8), (99, 3, 3)):
        study = make_study(SMALL_AXES)
        ran: list[float] = []
        run_study(
            study,
            lambda request: 1.0 + len(request.values),
            trials=trials,
            is_expired=lambda: len(ran) >= expired_after,  # noqa: B023
            on_trial=lambda _, result: ran.append(result),  # noqa: B023
        )
        assert len(ran) == expected


def test_seconds_are_those_of_the_study_and_not_of_the_trials() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def run(_: object) -> float:
        now[0] += 1000.0
        return 1.0

    seconds = run_study(
        make_study(SMALL_AXES), run, trials=3, is_expired=lambda: False, on_trial=lambda *_: None, clock=clock
    )
    assert seconds == 6.0  # one second for each of three choices, and for each of three results
