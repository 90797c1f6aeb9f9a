"""The events of a footprint as a list, and back."""

from __future__ import annotations

import pytest

from autobatch.footprint.layer_events import events_of, footprint_of
from autobatch.footprint.predict import footprint
from autobatch.footprint.program import Untraceable
from tests.support.step_workloads import WORKLOADS, setting, setup


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0)))


def test_a_footprint_is_that_of_its_events(step):
    assert footprint_of(step, events_of(step)) == step


def test_blocks_that_are_freed_twice_or_out_of_order_are_refused(step):
    found = events_of(step)
    freed = next(event for event in found if event.kind == "free")
    with pytest.raises(Untraceable, match="is freed twice"):
        footprint_of(step, [*found, freed])
    with pytest.raises(Untraceable, match="is taken as number"):
        footprint_of(step, [event for event in found if event.numbers[:1] != (0,)])
