"""Explanations of a footprint, against the replay and against sums by hand."""

from __future__ import annotations

import pytest
from autobatch.footprint.fit import footprint

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint import explain as explaining
from autobatch.footprint.explain import explain, layers_of, memory_curve
from autobatch.rehearsal.attempt import ATTEMPT_STEPS
from tests.support.step_workloads import WORKLOADS, setting, setup


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["transformer"]()), steps=ATTEMPT_STEPS))


def parameters():
    return sum(p.nbytes for p in setup(WORKLOADS["transformer"]()).model.parameters())


@pytest.mark.parametrize("most", [500, 60])
def test_the_curve_is_a_step_in_the_steady_state(step, most, monkeypatch):
    monkeypatch.setattr(explaining, "MOST_POSITIONS", most)
    found = memory_curve(step, 40, CountingAllocator())
    assert {len(sizes) for sizes in found.categories.values()} == {len(found.positions)}
    assert len(found.positions) <= most
    assert found.positions == sorted(found.positions)
    # The peak is that of the whole attempt, because the steady state needs most.
    totals = [sum(sizes) for sizes in zip(*found.categories.values(), strict=True)]
    assert max(totals) == replay(step.program.at(40), CountingAllocator()).peak_allocated_bytes
    # Adam's two moments are there from the first event to the last.
    assert set(found.categories["parameters"]) == {parameters()}
    state = found.categories["optimizer state"]
    assert min(state) == max(state) >= 2 * parameters()
    # All gradients are there while the second micro-batch runs and the optimizer steps.
    at = found.phases
    assert list(at) == ["forward 1", "backward 1", "forward 2", "backward 2", "optimizer"]
    assert list(at.values()) == sorted(at.values())
    second = next(i for i, position in enumerate(found.positions) if position >= at["forward 2"])
    assert found.categories["gradients"][second] == parameters()
    assert found.categories["gradients"][0] == 0


def test_the_modules_of_the_curve_are_its_activations(step):
    found = memory_curve(step, 40, CountingAllocator())
    assert 1 < len(found.modules) <= explaining.LAYERS
    assert [sum(sizes) for sizes in zip(*found.modules.values(), strict=True)] == found.categories[
        "activations"
    ]
    assert found.micro_batch == 40


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({}, []),
        ({"": 5}, ["loss and rest"]),
        ({"0": 1, "1": 2, "": 1}, ["model[0]", "model[1]", "loss and rest"]),
        # The body has most, so its parts are shown, and those of its larger part.
        ({"a": 1, "body.x": 1, "body.y.0": 4, "body.y.1": 4}, ["a", "body.x", "body.y.0", "body.y.1"]),
        # The smallest neighbours are drawn as one.
        (
            {"wte": 1, **{f"h.{at}.{part}": 10 for at in range(12) for part in "ab"}, "head": 60},
            ["wte … h.2", "h.3 … 4", "h.5 … 6", "h.7 … 8", "h.9 … 11", "head"],
        ),
    ],
)
def test_modules_are_drawn_in_few_layers(sizes, layers):
    found = layers_of(sizes)
    assert list(dict.fromkeys(found.values())) == layers
    assert found.keys() == sizes.keys()


def test_the_curve_shows_cached_memory(step):
    found = memory_curve(step, 40, CachingAllocator())
    totals = [sum(sizes) for sizes in zip(*found.categories.values(), strict=True)]
    assert max(totals) == replay(step.program.at(40), CachingAllocator()).peak_reserved_bytes
    assert min(found.categories["cached"]) >= 0


def test_an_explanation_adds_up():
    one = setup(WORKLOADS["perceptron"]())
    step = footprint(setting(one, capability=(8, 0)))
    parameters = sum(p.nbytes for p in one.model.parameters())
    small, large = explain(step, 1), explain(step, 4096)
    assert small.by_kind["parameters"] == parameters
    assert small.by_kind["optimizer state"] == 2 * parameters
    for found in (small, large):
        assert sum(found.by_kind.values()) == found.peak_bytes
        assert list(found.by_kind.values()) == sorted(found.by_kind.values(), reverse=True)
        assert sum(found.by_module.values()) == found.by_kind.get("activations", 0)
        assert found.phase in found.text()
    # An image of 432 numbers, one hidden layer of 48: all per sample, in bytes.
    assert explain(step, 4097).peak_bytes >= large.peak_bytes + 4 * 432
