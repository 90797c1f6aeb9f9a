"""Speeds relative to a default that is measured again: a machine that slows down changes no ratio."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.core.knobs import Configuration, defaults
from autobatch.tuning.configuration import RUNS, Measurement, infeasible
from autobatch.tuning.drift import DEFAULT_EVERY, DriftingMachine
from tests.support.studies import SMALL_AXES, CountingMeasure, search, speed_of

DEFAULT = {"i": 0}


def machine_of(measure: CountingMeasure) -> DriftingMachine:
    return DriftingMachine(measure, DEFAULT, "2026-11-21T21:19:00+00:00")


def test_the_default_is_measured_before_a_trial_and_again_every_few() -> None:
    measure = CountingMeasure(lambda values: Measurement(100.0 + int(values["i"] or 0)))
    machine = machine_of(measure)
    found = [machine.run({"i": number}) for number in range(1, 2 * DEFAULT_EVERY + 1)]
    asked = [values["i"] for values in measure.asked]
    assert asked == [0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10]
    assert found[0].relative == pytest.approx(1.01)
    assert {one.started for one in found} == {"2026-11-21T21:19:00+00:00"}


def test_the_default_as_a_trial_is_not_measured_twice() -> None:
    measure = CountingMeasure(lambda values: Measurement(50.0))
    machine = machine_of(measure)
    assert machine.run(DEFAULT).relative == 1.0
    machine.run({"i": 1})
    assert [values["i"] for values in measure.asked] == [0, 1]


def test_a_default_that_does_not_run_gives_no_ratio_and_is_not_tried_again() -> None:
    def run(values: Configuration) -> Measurement:
        return Measurement(10.0) if values["i"] else infeasible(RUNS, "crashed")

    measure = CountingMeasure(run)
    machine = machine_of(measure)
    found = [machine.run({"i": 1}) for _ in range(2 * DEFAULT_EVERY)]
    assert {one.relative for one in found} == {None}
    assert measure.asked.count(DEFAULT) == 1


def test_a_study_that_goes_on_while_the_machine_is_slow_still_finds_the_fastest(tmp_path: Path) -> None:
    """Half of the trials run on a machine that is five times slower; the best one is among them."""
    storage = str(tmp_path / "s.log")
    best = max(speed_of(values) for values in ({"micro_batch_shift": 1, "precision": "bf16"},))

    def slow(values: Configuration) -> Measurement:
        return Measurement(speed_of(values) / 5, 8)

    first = search(axes=SMALL_AXES, trials=3, storage=storage).tuning
    second = search(slow, SMALL_AXES, trials=8, storage=storage).tuning
    assert (first.remembered, second.remembered) == (0, 3)
    assert speed_of(second.best) == best
    base = speed_of(defaults(SMALL_AXES))
    for trial in second.history:
        assert trial.relative == pytest.approx(speed_of(trial.parameters) / base)
    assert len({trial.started for trial in second.history}) <= 2
