"""The events of a footprint as a list, and back."""

from __future__ import annotations

import pytest

from autobatch.footprint.fit import footprint
from autobatch.footprint.layer_events import Event, Run, events_of, footprint_of
from autobatch.footprint.program import Polynomial, Untraceable
from autobatch.footprint.tracing.recording import Product
from tests.support.step_workloads import WORKLOADS, setting, setup


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0)))


def test_a_footprint_is_that_of_its_events(step):
    assert footprint_of(step, [Run.once(events_of(step))]) == (step, tuple(range(len(step.program.events))))


def test_blocks_that_are_freed_twice_or_out_of_order_are_refused(step):
    found = events_of(step)
    freed = next(event for event in found if event.kind == "free")
    with pytest.raises(Untraceable, match="is freed twice"):
        footprint_of(step, [Run.once([*found, freed])])
    with pytest.raises(Untraceable, match="is taken as number"):
        footprint_of(step, [Run.once([event for event in found if event.numbers[:1] != (0,)])])
    with pytest.raises(Untraceable, match="freed before it is taken"):
        footprint_of(step, [Run.once([freed, *(event for event in found if event != freed)])])


def test_a_run_repeats_its_events_with_growing_numbers(step):
    rule = Polynomial(8)
    take = Event("take", "activations layer.#.body", 8, (0, 3), 5, rule)
    between = Event("product", "backward", 0, ())
    free = Event("free", "activations layer.#.body", 8, (0, 3), 6)
    found, origins = footprint_of(step, [Run([take, between, free], [(1, 2), (), (1, 2)], 3)])
    assert found.program.events == ((0, rule), (0, None), (1, rule), (1, None), (2, rule), (2, None))
    assert [label.module for label in found.labels] == ["layer.3.body", "layer.5.body", "layer.7.body"]
    assert found.products == tuple(Product(at, is_backward=True, is_fused=False) for at in (1, 3, 5))
    assert origins == (5, 6) * 3
