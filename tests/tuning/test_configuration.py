"""Search spaces: their points, their neighbours, and what a study knows of them."""

from __future__ import annotations

import math
import random

from autobatch.core.knobs import Configuration, defaults
from autobatch.tuning.configuration import (
    MEMORY,
    LogRange,
    Measurement,
    StoredResult,
    StudySpec,
    all_configurations,
    infeasible,
    key_of,
    nearest_unseen,
    size_of,
)
from tests.support.studies import AXES, SMALL_AXES


def distance(one: Configuration, other: Configuration) -> int:
    return sum(one[name] != other[name] for name in one)


def test_every_lists_each_configuration_once_and_the_default_first() -> None:
    points = list(all_configurations(AXES))
    assert points[0] == defaults(AXES)
    assert len(points) == size_of(AXES) == 4 * 2 * 2 * 3
    assert len({key_of(values) for values in points}) == len(points)
    assert all(values[axis.name] in axis.choices for values in points for axis in AXES)
    assert (list(all_configurations([])), size_of([])) == ([{}], 1)


def test_a_key_does_not_depend_on_the_order_of_names() -> None:
    assert key_of({"a": 1, "b": None}) == key_of({"b": None, "a": 1}) != key_of({"a": 2, "b": None})


def test_the_nearest_unseen_point_is_as_near_as_any() -> None:
    draw = random.Random(0)
    points = list(all_configurations(AXES))
    for _ in range(20):
        base = draw.choice(points)
        taken = [base, *draw.sample(points, draw.randrange(len(points) - 2))]
        left = [values for values in points if values not in taken]
        found = nearest_unseen(AXES, {key_of(values) for values in taken}, base, draw)
        assert found in left
        assert distance(found, base) == min(distance(values, base) for values in left)


def test_no_point_is_unseen_when_all_are_taken() -> None:
    taken = {key_of(values) for values in all_configurations(SMALL_AXES)}
    assert nearest_unseen(SMALL_AXES, taken, defaults(SMALL_AXES), random.Random(0)) is None


def test_a_measurement_is_feasible_unless_it_has_a_failure() -> None:
    assert Measurement(10.0, 4).feasible
    refused = infeasible(MEMORY, "full", over=0.5, micro_batch=3)
    assert not refused.feasible
    assert refused == Measurement(0.0, 3, "full", {MEMORY: 0.5})


def test_a_range_has_one_name_no_axes_and_infinitely_many_points() -> None:
    def encode(_: float) -> StoredResult:
        raise NotImplementedError

    spec = StudySpec(LogRange("x", 0.1, 10.0), "minimize", [], encode, lambda *_: 0.0, "x")
    assert (spec.names, spec.axes, spec.size) == ({"x"}, (), math.inf)
    finite = StudySpec(SMALL_AXES, "maximize", [], encode, lambda *_: 0.0, "x")
    assert (finite.names, finite.axes, finite.size) == ({"micro_batch_shift", "precision"}, SMALL_AXES, 8)
