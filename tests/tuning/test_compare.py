"""Comparison of two configurations in turn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from autobatch.core.errors import Infeasible
from autobatch.tuning.compare import ROUNDS, Comparison, Measurement, compare

BASE, OTHER = {"i": 0}, {"i": 1}


def compared(speed: Callable[[Any], float]) -> Comparison:
    return compare(lambda values: Measurement(speed(values), 4), BASE, OTHER)


def noisy(draw: random.Random, ratio: float, noise: float) -> Comparison:
    """Compare on a machine whose speed drifts, and where other work hits one measurement in twenty."""
    drift = [1.0]

    def speed(values: Any) -> float:
        drift[0] *= 0.97
        hiccup = draw.uniform(0.3, 0.9) if draw.random() < 0.05 else 1.0
        return 100 * drift[0] * (ratio if values["i"] else 1.0) * hiccup * math.exp(draw.gauss(0, noise))

    return compared(speed)


@pytest.mark.parametrize("noise", [0.01, 0.2])
def test_what_gains_nothing_is_hardly_ever_faster(noise: float) -> None:
    """The probability is 10 ÷ 512; of 1,000 comparisons, 33 are three standard deviations more."""
    draw = random.Random(1)
    assert sum(noisy(draw, 1.0, noise).is_faster for _ in range(1000)) <= 33


def test_the_bounds_hold_the_true_ratio_as_often_as_they_say() -> None:
    draw = random.Random(2)
    found = [noisy(draw, 1.5, 0.05) for _ in range(500)]
    whole = [one for one in found if one.low is not None and one.high is not None]
    assert len(whole) > 400
    assert sum(one.low > 1.5 for one in whole) <= 0.04 * len(whole)  # type: ignore[operator]
    assert sum(one.low <= 1.5 <= one.high for one in whole) >= 0.93 * len(whole)  # type: ignore[operator]
    assert all(one.low <= one.ratio <= one.high for one in whole)  # type: ignore[operator]


def test_without_noise_every_figure_is_exact() -> None:
    found = compared(lambda values: 130.0 if values["i"] else 100.0)
    assert found == Comparison(1.3, 1.3, 1.3, Measurement(100.0, 4), Measurement(130.0, 4))


def test_what_cannot_become_faster_any_more_does_not_run_again() -> None:
    ran: list[int] = []
    found = compare(
        lambda values: ran.append(values["i"]) or Measurement(100.0 - values["i"], 4), BASE, OTHER
    )  # type: ignore[func-returns-value]
    assert (found.ratio, found.low, found.is_faster) == (0.99, None, False)
    assert ran == [0, 1, 1, 0], "each goes first in turn"
    ran.clear()
    found = compare(lambda values: ran.append(1) or Measurement(100.0 + values["i"], 4), BASE, OTHER)  # type: ignore[func-returns-value]
    assert (found.is_faster, len(ran)) == (True, 2 * ROUNDS)


def test_a_configuration_that_fails_ends_the_comparison() -> None:
    def speed(values: Any) -> float:
        if values["i"]:
            raise Infeasible("crashed")
        return 1.0

    with pytest.raises(Infeasible, match="crashed"):
        compared(speed)
