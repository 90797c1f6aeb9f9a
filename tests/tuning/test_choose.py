"""The choice among finished trials."""

from __future__ import annotations

import math
import random

from autobatch.core.knobs import Configuration, defaults
from autobatch.tuning.configuration import Measurement
from tests.support.studies import AXES, CountingMeasure, search, speed_of

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
