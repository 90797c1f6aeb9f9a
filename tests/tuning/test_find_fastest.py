"""The search for the fastest configuration."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import GPSampler
from optuna.trial import TrialState

from autobatch.core.knobs import Configuration, SearchAxis, defaults
from autobatch.core.records import Tuning
from autobatch.report.facts import describe_tuning
from autobatch.tuning.compare import MINIMUM_GAIN
from autobatch.tuning.configuration import (
    Budget,
    Measurement,
    StudyLocation,
    all_configurations,
    infeasible,
    key_of,
    nearest_untried,
    size_of,
)
from autobatch.tuning.find_fastest import DEFAULT_EVERY, find_fastest
from tests.support.studies import AXES, SMALL_AXES, CountingMeasure, exact, open_journal, search, speed_of


def answer(found: Tuning) -> tuple[Any, ...]:
    return found.best, [one.parameters for one in found.history], found.best_samples_per_s, found.comparisons


def test_the_first_trial_is_the_default_and_no_configuration_is_tried_twice() -> None:
    measure = CountingMeasure()
    found = search(measure, trials=12).tuning
    assert found.history[0].parameters == defaults(AXES) == measure.asked[0]
    tried = [key_of(one.parameters) for one in found.history]
    assert len(tried) == len(set(tried)) == found.trials == 12


def test_the_answer_is_close_to_the_true_best() -> None:
    best = max(map(speed_of, all_configurations(AXES)))
    for seed in range(2):
        found = search(trials=20, seed=seed).tuning
        assert speed_of(found.best) >= 0.97 * best
        assert found.best_samples_per_s == pytest.approx(speed_of(found.best))
        assert found.baseline_samples_per_s == pytest.approx(1000)


def test_a_small_space_is_tried_completely() -> None:
    measure = CountingMeasure()
    found = search(measure, SMALL_AXES, trials=30).tuning
    assert found.trials == size_of(SMALL_AXES) == 8
    assert (found.sampler, found.best) == (
        "every configuration",
        {"micro_batch_shift": 1, "precision": "bf16"},
    )


def test_the_same_seed_gives_the_same_answer_and_another_seed_other_trials() -> None:
    once = search(seed=3, trials=8).tuning
    assert answer(once) == answer(search(seed=3, trials=8).tuning)
    assert once.history != search(seed=4, trials=8).tuning.history


def test_the_default_is_kept_if_nothing_is_faster() -> None:
    def slower(values: Configuration) -> Measurement:
        changed = sum(values[name] != value for name, value in defaults(AXES).items())
        return Measurement(1000.0 * (1 + MINIMUM_GAIN / 2 * (changed == 1)) * 0.9 ** max(0, changed - 1), 64)

    found = search(slower).tuning
    assert found.best == defaults(AXES)
    assert found.notes == ["kept the default: no other was faster by 2 % beyond the noise"]
    assert found.best_samples_per_s == found.baseline_samples_per_s


def test_without_a_feasible_trial_the_plan_is_kept_with_a_reason() -> None:
    answered = search(lambda _: infeasible("the GPU is full"), SMALL_AXES)
    assert answered.winner is None
    assert answered.tuning.best == defaults(SMALL_AXES)
    assert (answered.tuning.best_samples_per_s, answered.tuning.baseline_samples_per_s) == (0.0, 0.0)
    assert answered.tuning.notes == [
        "kept the plan: none of 8 configurations ran. The first one: the GPU is full"
    ]


def test_a_default_that_cannot_be_measured_is_kept() -> None:
    def measure(values: Configuration) -> Measurement:
        return infeasible("full") if values == defaults(SMALL_AXES) else exact(values)

    found = search(measure, SMALL_AXES).tuning
    assert found.best == defaults(SMALL_AXES)
    assert found.notes == ["kept the plan: the default configuration could not be measured (full)"]


def test_a_winner_that_does_not_fit_is_replaced_by_the_next() -> None:
    best = {"micro_batch_shift": 1, "precision": "bf16"}
    found = search(
        axes=SMALL_AXES, confirm=lambda values: exact(values) if values != best else infeasible("too big")
    )
    assert found.tuning.best == {"micro_batch_shift": 0, "precision": "bf16"}
    assert found.tuning.notes == ["left out a faster configuration, because it does not fit: too big"]
    none = search(axes=SMALL_AXES, confirm=lambda _: infeasible("too big")).tuning
    assert none.best == defaults(SMALL_AXES)


def test_no_trial_starts_after_the_time_limit() -> None:
    clock = itertools.count()
    found = search(expired=lambda: next(clock) >= 5).tuning
    assert found.trials == 5
    nothing = search(expired=lambda: True)
    assert (nothing.tuning.trials, nothing.winner) == (0, None)
    assert nothing.tuning.notes == ["kept the plan: no trial was run"]


def test_speeds_of_an_earlier_search_carry_its_date(tmp_path: Path) -> None:
    """The first search runs all trials at 100 samples/s; the machine is ten times faster afterwards."""
    storage, axes = str(tmp_path / "s.log"), [SearchAxis("a", (0, 1))]

    def found(trials: int, speed: float) -> Tuning:
        def measure(values: Configuration) -> Measurement:
            return Measurement(speed / (1 + 9 * int(values["a"] or 0)), 8)

        return search(measure, axes, trials=trials, storage=storage).tuning

    first = found(1, 100.0)
    assert (first.best_samples_per_s, first.measured) == (100.0, None)
    again = found(1, 1000.0)
    assert again.best_samples_per_s == 100.0
    assert again.measured == first.history[0].started
    assert f"kept the default, 100 samples/s (measured on {again.measured[:10]}" in describe_tuning(again)
    more = found(2, 1000.0)
    assert (more.best_samples_per_s, more.measured) == (1000.0, None)
    assert "measured on" not in describe_tuning(more)


def test_without_axes_the_default_is_measured_once() -> None:
    measure = CountingMeasure(lambda _: Measurement(10.0, 4))
    answered = search(measure, [])
    assert (answered.tuning.trials, answered.tuning.best, len(measure.asked)) == (1, {}, 1)
    assert answered.winner is not None
    assert answered.winner.micro_batch == 4


def test_the_sampler_takes_part_of_the_time() -> None:
    ticks = itertools.count()
    found = search(axes=SMALL_AXES, clock=lambda: float(next(ticks))).tuning
    assert 0 < found.sampler_seconds < found.seconds


def test_the_search_hardly_ever_chooses_a_slower_configuration() -> None:
    for seed in range(4):
        draw = random.Random(seed)
        speeds = {key_of(v): math.exp(draw.gauss(-0.05, 0.1)) for v in all_configurations(SMALL_AXES)}
        speeds[key_of(defaults(SMALL_AXES))] = 1.0

        def measure(
            values: Configuration, speeds: dict[Any, float] = speeds, draw: random.Random = draw
        ) -> Measurement:
            return Measurement(1000 * speeds[key_of(values)] * math.exp(draw.gauss(0, 0.05)), 1)

        found = search(measure, SMALL_AXES, seed=seed).tuning
        assert speeds[key_of(found.best)] >= 0.98


class Watch:
    """A clock that a measurement moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("run_samples", "trials"), [(None, 4), (10_000, 4), (3000, 3), (1600, 2), (1500, 1), (10, 1)]
)
def test_the_search_takes_at_most_half_of_the_time_that_the_run_takes(run_samples, trials: int) -> None:
    """Each trial takes a second, and the default runs 100 samples a second.

    No trial runs whose comparison with the default there is no time for.
    """
    watch = Watch()

    def measure(values: Configuration) -> Measurement:
        watch.now += 1.0
        return Measurement(100.0 + 50.0 * values["a"], 8)

    found = find_fastest(
        measure,
        lambda _: Measurement(0.0, 8),
        [SearchAxis("a", (0, 1, 2, 3))],
        budget=Budget(4, run_samples=run_samples),
        seed=0,
        place=StudyLocation("pays", None, {}),
        clock=watch,
    )
    assert found.tuning.trials == trials
    assert (found.tuning.best["a"] == 0) == (trials == 1)
    assert watch.now <= max(1.0, (run_samples or math.inf) / 100 / 2)
    stopped = [note for note in found.tuning.notes if "cannot pay back" in note]
    assert [f"stopped tuning after {trials} of 4 trials" in note for note in stopped] == [True] * (trials < 4)


USEFUL = "precision"


def test_two_searches_of_one_machine_choose_alike() -> None:
    """Only the precision matters; the other knobs gain nothing, and the noise is 2 %."""
    chosen = []
    for seed in range(5):
        draw = random.Random(seed)

        def measure(values: Configuration, draw: random.Random = draw) -> Measurement:
            gain = 0.4 * (values["precision"] == "bf16") - 0.3 * (values["checkpointing"] == "full")
            gain -= 0.3 * int(values["micro_batch_shift"] or 0)
            return Measurement(1000 * math.exp(gain + draw.gauss(0, 0.02)), 64)

        best = search(measure, trials=10, seed=seed).tuning.best
        chosen.append({name for name, value in best.items() if value != defaults(AXES)[name]})
    assert chosen.count({USEFUL}) >= 4, chosen


def test_the_comparison_with_the_default_is_recorded() -> None:
    found = search(trials=12).tuning
    base = speed_of(defaults(AXES))
    assert [one.chosen for one in found.comparisons].count(True) == 1
    for one in found.comparisons:
        values = defaults(AXES) | one.changes
        assert math.isclose(one.ratio, speed_of(values) / base)
    ratios = [one.ratio for one in found.comparisons]
    assert ratios == sorted(ratios, reverse=True)


def test_the_best_runs_again_without_each_of_its_changes() -> None:
    measure = CountingMeasure()
    found = search(measure, trials=12).tuning
    best = max(found.history, key=lambda one: one.relative or 0.0).parameters
    for name, value in defaults(AXES).items():
        assert best | {name: value} in measure.asked


def test_the_default_is_measured_first_and_again_every_few_trials(tmp_path: Path) -> None:
    axes = [SearchAxis("i", tuple(range(12)))]
    measure = CountingMeasure(lambda values: Measurement(100.0 + int(values["i"] or 0)))
    found = search(measure, axes, trials=12).tuning
    asked = [values["i"] for values in measure.asked]
    assert asked[0] == 0
    assert asked.index(0, 1) == DEFAULT_EVERY + 1
    assert [one.relative for one in found.history] == pytest.approx(
        [(100 + int(one.parameters["i"] or 0)) / 100 for one in found.history]
    )


def test_a_default_that_does_not_run_gives_no_ratio_and_is_not_tried_again() -> None:
    def run(values: Configuration) -> Measurement:
        return Measurement(10.0) if values["i"] else infeasible("crashed")

    measure = CountingMeasure(run)
    found = search(measure, [SearchAxis("i", tuple(range(12)))], trials=12).tuning
    assert {one.relative for one in found.history} == {None}
    assert measure.asked.count({"i": 0}) == 1


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


def test_an_infeasible_trial_is_complete_and_never_chosen(tmp_path: Path) -> None:
    def with_limits(values: Configuration) -> Measurement:
        if values["precision"] == "bf16":
            return infeasible("its losses differ from the reference")
        if values["checkpointing"] == "full":
            return infeasible("out of memory")
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
            assert trial.value >= min(feasible) or trial.value == min(t.value for t in trials)
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


def test_a_point_that_the_sampler_repeats_takes_over_the_known_result(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    search(trials=6, storage=storage)
    open_journal(tmp_path / "s.log").enqueue_trial(defaults(AXES))
    measure = CountingMeasure()
    found = search(measure, trials=9, storage=storage).tuning
    assert found.trials == 9
    assert measure.asked[0] == defaults(AXES), "of today"
    assert defaults(AXES) not in measure.asked[1:4]
    known = [trial for trial in open_journal(tmp_path / "s.log").trials if trial.params == defaults(AXES)]
    assert [trial.value for trial in known] == pytest.approx([1000, 1000])


def test_an_error_of_a_trial_closes_it_and_passes(tmp_path: Path) -> None:
    def broken(values: Configuration) -> Measurement:
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


def test_the_nearest_untried_point_is_as_near_as_any() -> None:
    draw = random.Random(0)
    points = list(all_configurations(AXES))
    for _ in range(20):
        base = draw.choice(points)
        tried = [base, *draw.sample(points, draw.randrange(len(points) - 2))]
        left = [values for values in points if values not in tried]
        found = nearest_untried(AXES, {key_of(values) for values in tried}, base, draw)
        assert found in left
        assert distance(found, base) == min(distance(values, base) for values in left)
    every = {key_of(values) for values in points}
    assert nearest_untried(AXES, every, points[0], draw) is None


def distance(one: Configuration, other: Configuration) -> int:
    return sum(one[name] != other[name] for name in one)
