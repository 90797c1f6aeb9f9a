"""Comparison of two configurations in turn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from autobatch.tuning.trial import ROUNDS, Comparison, compare


def compared(speed: Callable[[Any], float]) -> Comparison:
    return compare(speed, {"i": 0}, {"i": 1})


def noisy(draw: random.Random, ratio: float, noise: float) -> Comparison:
    """Compare on a machine whose speed drifts, and where other work hits one measurement in twenty."""
    drift = [1.0]

    def speed(values: Any) -> float:
        drift[0] *= 0.97
        hiccup = draw.uniform(0.3, 0.9) if draw.random() < 0.05 else 1.0
        return 100 * drift[0] * (ratio if values["i"] else 1.0) * hiccup * math.exp(draw.gauss(0, noise))

    return compared(speed)


def test_what_gains_nothing_is_hardly_ever_faster() -> None:
    """The probability is 10 ÷ 512; of 1,000 comparisons, 33 are three standard deviations more."""
    draw = random.Random(1)
    assert sum(noisy(draw, 1.0, 0.2).is_faster for _ in range(1000)) <= 33


def test_the_bound_holds_as_often_as_it_says() -> None:
    draw = random.Random(2)
    found = [noisy(draw, 1.5, 0.05) for _ in range(500)]
    bounds = [one.low for one in found if one.low is not None]
    assert len(bounds) > 400
    assert sum(low > 1.5 for low in bounds) <= 0.04 * len(bounds)


def test_what_cannot_become_faster_any_more_does_not_run_again() -> None:
    ran: list[int] = []

    def speed(values: Any) -> float:
        ran.append(values["i"])
        return 100.0 - values["i"]

    found = compared(speed)
    assert (found.ratio, found.low, found.is_faster) == (0.99, None, False)
    assert ran == [0, 1, 1, 0], "each goes first in turn"
    ran.clear()
    found = compared(lambda values: ran.append(1) or 100.0 + 30 * values["i"])  # type: ignore[func-returns-value]
    assert found == Comparison(1.3, 1.3, 100.0, 130.0)
    assert len(ran) == 2 * ROUNDS
