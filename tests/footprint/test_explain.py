"""Explanations of a step from its events, against the replay and against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import Trace, replay
from autobatch.footprint import explain as explaining
from autobatch.footprint.explain import Explanation, explain, memory_curve
from autobatch.rehearsal.rehearsal import attempt
from tests.support.step_workloads import WORKLOADS, setup

SIZE = 40


@pytest.fixture(scope="module")
def ran() -> Trace:
    """Return the events of real steps."""
    trace = attempt(setup(WORKLOADS["transformer"]()), SIZE).trace
    assert trace is not None
    return trace


def parameters(name: str = "transformer") -> int:
    return sum(p.nbytes for p in setup(WORKLOADS[name]()).model.parameters())


@pytest.mark.parametrize(("most", "allocator"), [(500, Allocator), (60, CachingAllocator)])
def test_the_curve_is_a_step_in_the_steady_state(ran: Trace, most: int, allocator, monkeypatch) -> None:
    monkeypatch.setattr(explaining, "MOST_POSITIONS", most)
    found = memory_curve(ran, SIZE, allocator())
    assert {len(sizes) for sizes in found.categories.values()} == {len(found.positions)}
    assert len(found.positions) <= most
    assert found.positions == sorted(found.positions)
    # The peak is that of the whole attempt, because the steady state needs most.
    cached = found.categories.pop("cached", [0])
    totals = [sum(sizes) for sizes in zip(*found.categories.values(), strict=True)]
    assert max(totals) == replay(ran, Allocator()).peak_allocated_bytes
    assert min(cached) >= 0
    if any(cached):
        held = max(map(sum, zip(totals, cached, strict=True)))
        assert held == replay(ran, allocator()).peak_reserved_bytes
    # Adam's two moments are there from the first event to the last.
    assert min(found.categories["parameters"]) >= parameters()
    assert 2 * parameters() <= min(found.categories["optimizer state"]) < 2.5 * parameters()
    # All gradients are there while the second micro-batch runs and the optimizer steps.
    at = found.phases
    assert list(at) == ["forward 1", "backward 1", "forward 2", "backward 2", "optimizer"]
    assert list(at.values()) == sorted(at.values())
    second = next(i for i, position in enumerate(found.positions) if position >= at["forward 2"])
    assert found.categories["gradients"][second] >= parameters() > found.categories["gradients"][0]
    assert 1 < len(found.modules) <= explaining.MOST_PARTS
    activations = [sum(sizes) for sizes in zip(*found.modules.values(), strict=True)]
    assert activations == found.categories["activations"]


def test_an_explanation_adds_up() -> None:
    opened = setup(WORKLOADS["perceptron"]())
    runs = {size: attempt(opened, size).trace for size in (1, 512)}
    small, large = (explain(trace) for trace in runs.values() if trace is not None)
    assert small.by_kind["parameters"] >= parameters("perceptron")
    assert small.by_kind["optimizer state"] >= 2 * parameters("perceptron")
    for found in (small, large):
        assert sum(found.by_kind.values()) == found.peak_bytes
        assert list(found.by_kind.values()) == sorted(found.by_kind.values(), reverse=True)
        assert sum(found.by_module.values()) == found.by_kind.get("activations", 0)
        assert f"{found.phase}: " in found.text()
    assert Explanation(0, "setup", {}, {}).text() == "0 B at the peak in the setup"
    # An image of 432 numbers: per sample, in bytes.
    assert large.peak_bytes >= small.peak_bytes + 400 * 4 * 432


def test_a_run_that_failed_is_explained_up_to_its_failure() -> None:
    made = setup(WORKLOADS["perceptron"]())
    whole = attempt(made, 64)
    peak = whole.attempt.peak_allocated_bytes
    assert peak is not None
    failed = attempt(replace(made, device=made.device.budgeted(peak - 1)), 64)
    assert failed.trace is not None
    found = explain(failed.trace)
    assert not failed.attempt.fits
    assert found.phase == failed.attempt.phase
    assert 0 < found.peak_bytes < peak
