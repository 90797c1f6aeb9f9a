"""Comparison of configurations with the default."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from autobatch.tuning.compare import LEAST_ROUNDS, compare
from autobatch.tuning.configuration import Measurement, infeasible


@pytest.mark.parametrize(("noise", "with_hiccups"), [(0.02, True), (0.1, True)])
def test_a_configuration_that_replaces_the_default_is_hardly_ever_slower(
    noise: float, with_hiccups: bool
) -> None:
    """At most 1 of 100 runs chooses less than 0.98 of the default's true speed, on surfaces of all kinds."""
    runs, slower, gained = 400, 0, 0
    for seed in range(runs):
        draw = random.Random(f"{seed} {noise} {with_hiccups}")
        spread, lift = draw.choice([0.01, 0.03, 0.1, 0.3]), draw.choice([-0.1, -0.03, 0.0])
        speeds = [1.0, *(math.exp(draw.gauss(lift, spread)) for _ in range(20))]

        def measure(values: Any, draw: random.Random = draw, speeds: list[float] = speeds) -> Measurement:
            hiccup = draw.uniform(0.3, 0.9) if with_hiccups and draw.random() < 0.05 else 1.0
            return Measurement(speeds[int(values["i"] or 0)] * hiccup * math.exp(draw.gauss(0, noise)), 1)

        first = sorted(range(1, 21), key=lambda i: -measure({"i": i}).samples_per_s)[:3]
        ranking = compare(measure, {"i": 0}, [{"i": i} for i in first]).ranking
        chosen = speeds[int(ranking[0].values["i"] or 0)] if ranking else 1.0
        slower += chosen < 0.98
        gained += chosen > 1.02
    assert slower <= runs / 100
    assert gained > runs / 4


def test_without_noise_the_ranking_is_by_speed_and_figures_are_exact() -> None:
    speeds = [100.0, 130.0, 101.0, 150.0, 70.0]
    others = [{"i": i} for i in range(1, 5)]
    found = compare(lambda values: Measurement(speeds[int(values["i"] or 0)]), {"i": 0}, others)
    assert [one.values["i"] for one in found.ranking] == [3, 1]
    assert {len(one.ratios) for one in found.contenders} == {LEAST_ROUNDS}
    assert found.baseline == Measurement(100.0)
    assert [found.speed_of(one).samples_per_s for one in found.contenders] == pytest.approx(speeds[1:])


def test_a_change_that_gains_nothing_is_chosen_in_one_of_40_comparisons_at_most() -> None:
    """The comparison may end after each of several rounds, and each is another chance to be wrong."""
    runs, wrong = 1000, 0
    for seed in range(runs):
        draw = random.Random(seed)
        found = compare(
            lambda _, draw=draw: Measurement(math.exp(draw.gauss(0, 0.2))),  # type: ignore[misc]
            {"i": 0},
            [{"i": 1}],
        )
        wrong += bool(found.ranking)
    assert wrong <= runs * 0.03


def test_of_equally_fast_configurations_the_one_with_the_fewest_changes_wins() -> None:
    base = {"precision": "fp32", "optimizer": "default", "channels_last": False}
    others = [
        base | {"precision": "bf16", "optimizer": "fused", "channels_last": True},
        base | {"precision": "bf16", "channels_last": True},
        base | {"precision": "bf16"},
        base | {"optimizer": "fused"},
    ]
    for seed in range(20):
        draw = random.Random(seed)

        def measure(values: Any, draw: random.Random = draw) -> Measurement:
            gain = 0.5 * (values["precision"] == "bf16") + 0.005 * (values["optimizer"] == "fused")
            return Measurement(1000 * math.exp(gain + draw.gauss(0, 0.01)))

        assert compare(measure, base, others).ranking[0].values == others[2]


def test_every_ratio_has_an_interval_that_holds_the_true_one() -> None:
    inside = 0
    for seed in range(200):
        draw = random.Random(seed)

        def measure(values: Any, draw: random.Random = draw) -> Measurement:
            return Measurement((1.3 if values["i"] else 1.0) * math.exp(draw.gauss(0, 0.05)))

        (contender,) = compare(measure, {"i": 0}, [{"i": 1}]).contenders
        found = contender.record({"i": 0}, chosen=False)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.ratio <= found.high
        inside += found.low <= 1.3 <= found.high
    assert inside >= 190


def test_a_configuration_that_fails_once_is_not_measured_again_nor_with_a_default_that_fails() -> None:
    asked = []

    def measure(values: Any) -> Measurement:
        asked.append(values["i"])
        return infeasible("crashed") if values["i"] == 1 else Measurement(100.0 + 100 * bool(values["i"]))

    found = compare(measure, {"i": 0}, [{"i": 1}, {"i": 2}])
    assert [one.values for one in found.ranking] == [{"i": 2}]
    assert (found.contenders[0].found, asked.count(1)) == (None, 1)
    found = compare(measure, {"i": 1}, [{"i": 2}])
    assert (found.ranking, found.baseline, found.contenders[0].ratios) == ([], None, [])
