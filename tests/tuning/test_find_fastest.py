"""The search for the fastest configuration."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.knobs import Configuration, SearchAxis, defaults
from autobatch.core.records.tuning import Tuning
from autobatch.report.sentences import tuning_in_words
from autobatch.report.summary import describe_tuning
from autobatch.tuning.compare_rates import MINIMUM_GAIN
from autobatch.tuning.configuration import (
    MEMORY,
    Measurement,
    all_configurations,
    infeasible,
    key_of,
    size_of,
)
from autobatch.tuning.find_fastest import Budget, StudyLocation, find_fastest
from tests.support.studies import AXES, SMALL_AXES, CountingMeasure, exact, search, speed_of


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
    answered = search(lambda _: infeasible(MEMORY, "the GPU is full"), SMALL_AXES)
    assert answered.winner is None
    assert answered.tuning.best == defaults(SMALL_AXES)
    assert (answered.tuning.best_samples_per_s, answered.tuning.baseline_samples_per_s) == (0.0, 0.0)
    assert answered.tuning.notes == [
        "kept the plan: none of 8 configurations ran. The first one: the GPU is full"
    ]


def test_a_default_that_cannot_be_measured_is_kept() -> None:
    def measure(values: Configuration) -> Measurement:
        return infeasible(MEMORY, "full") if values == defaults(SMALL_AXES) else exact(values)

    found = search(measure, SMALL_AXES).tuning
    assert found.best == defaults(SMALL_AXES)
    assert found.notes == ["kept the plan: the default configuration could not be measured (full)"]


def test_a_winner_that_does_not_fit_is_replaced_by_the_next() -> None:
    best = {"micro_batch_shift": 1, "precision": "bf16"}
    found = search(axes=SMALL_AXES, confirm_fits=lambda values: "too big" if values == best else None)
    assert found.tuning.best == {"micro_batch_shift": 0, "precision": "bf16"}
    assert found.tuning.notes == ["left out a faster configuration, because it does not fit: too big"]
    none = search(axes=SMALL_AXES, confirm_fits=lambda _: "too big").tuning
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
    assert "measured on" not in describe_tuning(more) + tuning_in_words(more)


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
