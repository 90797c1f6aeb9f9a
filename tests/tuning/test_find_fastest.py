"""The search for the fastest configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import GPSampler
from optuna.trial import TrialState

from autobatch.core.knobs import SearchAxis, defaults
from autobatch.report.facts import describe_tuning
from autobatch.tuning.compare import MINIMUM_GAIN
from autobatch.tuning.configuration import Measurement, infeasible
from tests.support.trials import (
    AXES,
    SMALL_AXES,
    CountingMeasure,
    all_points,
    exact,
    open_journal,
    search,
    speed_of,
)

DEFAULT = defaults(AXES)
TWELVE = [SearchAxis("i", tuple(range(12)))]
FASTEST = {"micro_batch_shift": 1, "precision": "bf16"}
"""Of the small axes."""


def test_the_answer_is_close_to_the_best_and_compared_with_the_default() -> None:
    measure = CountingMeasure()
    found = search(measure, trials=14).tuning
    tried = [tuple(one.parameters.items()) for one in found.history]
    assert found.history[0].parameters == DEFAULT == measure.asked[0]
    assert len(tried) == len(set(tried)) == found.trials == 14
    assert speed_of(found.best) >= 0.97 * max(map(speed_of, all_points(AXES)))
    assert found.best_samples_per_s == pytest.approx(speed_of(found.best))
    assert found.baseline_samples_per_s == pytest.approx(1000)
    assert [one.chosen for one in found.comparisons].count(True) == 1
    ratios = [one.ratio for one in found.comparisons]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios == pytest.approx([speed_of(DEFAULT | one.changes) / 1000 for one in found.comparisons])
    # A change that gains nothing is left out, so the best runs again without each of its changes.
    best = max(found.history, key=lambda one: one.relative or 0.0).parameters
    assert all(best | {name: value} in measure.asked for name, value in DEFAULT.items())
    assert search(trials=14).tuning.comparisons == found.comparisons, "of the same seed"


def test_a_small_space_is_tried_completely() -> None:
    found = search(axes=SMALL_AXES, trials=30).tuning
    assert (found.trials, found.sampler, found.best) == (8, "every configuration", FASTEST)
    alone = search(CountingMeasure(lambda _: Measurement(10.0, 4)), [])
    assert (alone.tuning.trials, alone.tuning.best, alone.micro_batch) == (1, {}, 4)


def slower(values: Any) -> Measurement:
    changed = sum(values[name] != value for name, value in defaults(SMALL_AXES).items())
    return Measurement(1000.0 * (1 + MINIMUM_GAIN / 2 * (changed == 1)) * 0.9 ** max(0, changed - 1), 64)


def full_at_default(values: Any) -> Measurement:
    return infeasible("full") if values == defaults(SMALL_AXES) else exact(values)


@pytest.mark.parametrize(
    ("measure", "more", "note"),
    [
        (slower, {}, "kept the default: no other was faster by 2 % beyond the noise"),
        (
            lambda _: infeasible("full"),
            {},
            "kept the plan: none of 8 configurations ran. The first one: full",
        ),
        (full_at_default, {}, "kept the plan: the default configuration could not be measured (full)"),
        (exact, {"expired": lambda: True}, "kept the plan: no trial was run"),
    ],
)
def test_the_default_is_kept_with_a_reason(measure, more: dict[str, Any], note: str) -> None:
    found = search(measure, SMALL_AXES, **more)
    assert (found.tuning.best, found.tuning.notes) == (defaults(SMALL_AXES), [note])
    assert found.tuning.best_samples_per_s == found.tuning.baseline_samples_per_s


def test_a_winner_that_does_not_fit_is_replaced_by_the_next() -> None:
    found = search(
        axes=SMALL_AXES, confirm=lambda values: infeasible("too big") if values == FASTEST else exact(values)
    )
    assert found.tuning.best == {"micro_batch_shift": 0, "precision": "bf16"}
    assert found.tuning.notes == ["left out a faster configuration, because it does not fit: too big"]
    none = search(axes=SMALL_AXES, confirm=lambda _: infeasible("too big")).tuning
    assert none.best == defaults(SMALL_AXES)


@pytest.mark.parametrize(("run_samples", "trials"), [(None, 4), (3000, 3), (1600, 2), (10, 1)])
def test_the_search_takes_at_most_half_of_the_time_that_the_run_takes(run_samples, trials: int) -> None:
    """Each trial takes a second, and the default runs 100 samples a second.

    No trial runs whose comparison with the default there is no time for.
    """
    now = [0.0]

    def measure(values: Any) -> Measurement:
        now[0] += 1.0
        return Measurement(100.0 + 50.0 * values["a"], 8)

    axes = [SearchAxis("a", (0, 1, 2, 3))]
    found = search(measure, axes, trials=4, run_samples=run_samples, clock=lambda: now[0]).tuning
    assert found.trials == trials
    assert (found.best["a"] == 0) == (trials == 1)
    assert now[0] <= max(1.0, (run_samples or math.inf) / 100 / 2)
    stopped = [note for note in found.notes if "than they can save" in note]
    assert [f"tuning stopped after {trials} of 4 trials" in note for note in stopped] == [True] * (trials < 4)
    assert (found.seconds, found.sampler_seconds) == (now[0], 0.0)


def test_the_default_is_measured_first_and_again_every_few_trials_if_it_runs() -> None:
    measure = CountingMeasure(lambda values: Measurement(100.0 + int(values["i"] or 0)))
    found = search(measure, TWELVE).tuning
    asked = [values["i"] for values in measure.asked]
    assert (asked[0], asked.index(0, 1)) == (0, 6)
    assert [one.relative for one in found.history] == pytest.approx(
        [(100 + int(one.parameters["i"] or 0)) / 100 for one in found.history]
    )
    measure = CountingMeasure(lambda values: Measurement(10.0) if values["i"] else infeasible("crashed"))
    assert {one.relative for one in search(measure, TWELVE).tuning.history} == {None}
    assert measure.asked.count({"i": 0}) == 1


def test_a_study_that_goes_on_while_the_machine_is_slow_still_finds_the_fastest(tmp_path: Path) -> None:
    """Half of the trials run on a machine that is five times slower; the best one is among them."""
    storage = str(tmp_path / "deep" / "s.log")
    first = search(axes=SMALL_AXES, trials=3, storage=storage).tuning
    measure = CountingMeasure(lambda values: Measurement(speed_of(values) / 5, 8))
    second = search(measure, SMALL_AXES, trials=8, storage=storage).tuning
    assert (first.remembered, second.remembered) == (0, 3)
    assert second.history[:3] == first.history
    assert second.best == FASTEST
    for trial in second.history:
        assert trial.relative == pytest.approx(speed_of(trial.parameters) / 1000)
    # The default is measured again at the start, and every few trials; no other one is in its trials.
    fresh = [one.parameters for one in second.history[3:]]
    assert measure.asked[0] == defaults(SMALL_AXES)
    assert [values for values in measure.asked[:6] if values != defaults(SMALL_AXES)] == fresh


def test_speeds_of_an_earlier_search_carry_its_date(tmp_path: Path) -> None:
    """The first search runs all trials at 100 samples/s; the machine is ten times faster afterwards."""
    storage, axes = str(tmp_path / "s.log"), [SearchAxis("a", (0, 1))]
    first, again, more = (
        search(
            lambda values, speed=speed: Measurement(speed / (1 + 9 * values["a"]), 8),
            axes,
            trials=trials,
            storage=storage,
        ).tuning
        for trials, speed in ((1, 100.0), (1, 1000.0), (2, 1000.0))
    )
    assert [one.best_samples_per_s for one in (first, again, more)] == [100.0, 100.0, 1000.0]
    assert [one.measured for one in (first, again, more)] == [None, first.history[0].started, None]
    assert f"kept the default, 100 samples/s (measured on {again.measured[:10]}" in describe_tuning(again)
    assert "measured on" not in describe_tuning(more)


def test_an_infeasible_trial_is_complete_and_never_chosen(tmp_path: Path) -> None:
    def with_limits(values: Any) -> Measurement:
        if values["precision"] == "bf16":
            return infeasible("its losses differ from the reference")
        return infeasible("out of memory") if values["checkpointing"] == "full" else exact(values)

    found = search(with_limits, trials=16, storage=str(tmp_path / "s.log")).tuning
    assert (found.best["precision"], found.notes) == ("fp32", [])
    refusals = [one for one in found.history if not one.feasible]
    assert {one.note for one in refusals} == {"its losses differ from the reference", "out of memory"}
    assert all(one.samples_per_s is None for one in refusals)
    study = open_journal(tmp_path / "s.log")
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert study.metric_names == ["samples per second"]
    # A figure beyond all others would flatten the differences between them.
    least = min(one.samples_per_s for one in found.history if one.samples_per_s is not None)
    for trial, one in zip(study.trials, found.history, strict=True):
        assert trial.value == pytest.approx(one.samples_per_s) if one.feasible else trial.value >= least


def test_a_point_that_the_sampler_repeats_takes_over_the_known_result(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    search(trials=6, storage=storage)
    open_journal(tmp_path / "s.log").enqueue_trial(DEFAULT)
    measure = CountingMeasure()
    assert search(measure, trials=9, storage=storage).tuning.trials == 9
    assert measure.asked[0] == DEFAULT, "of today"
    assert DEFAULT not in measure.asked[1:4]
    known = [trial for trial in open_journal(tmp_path / "s.log").trials if trial.params == DEFAULT]
    assert [trial.value for trial in known] == pytest.approx([1000, 1000])


def test_an_error_of_a_trial_closes_it_and_is_raised(tmp_path: Path) -> None:
    def broken(values: Any) -> Measurement:
        raise TypeError("of the workload")

    with pytest.raises(TypeError, match="of the workload"):
        search(broken, storage=str(tmp_path / "s.log"))
    assert [trial.state for trial in open_journal(tmp_path / "s.log").trials] == [TrialState.FAIL]


def test_a_sampler_that_fails_leaves_the_choice_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no finite values")

    monkeypatch.setattr(GPSampler, "sample_relative", fails)
    found = search(trials=12).tuning
    assert found.trials == 12
    assert "Optuna's sampler failed (no finite values)" in found.notes[-1]
