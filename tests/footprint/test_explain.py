"""The pictures of a footprint, against the replay and against sums by hand."""

from __future__ import annotations

import pytest

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint import explain as curves
from autobatch.footprint.explain import memory_curve, predicted_points
from autobatch.footprint.predict import footprint
from autobatch.probing.attempt import ATTEMPT_STEPS
from tests.footprint.test_trace_step import setting, setup
from tests.support.step_workloads import WORKLOADS


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["transformer"]()), steps=ATTEMPT_STEPS))


def parameters():
    return sum(p.nbytes for p in setup(WORKLOADS["transformer"]()).model.parameters())


@pytest.mark.parametrize("most", [500, 60])
def test_a_step_in_the_steady_state(step, most, monkeypatch):
    monkeypatch.setattr(curves, "MOST_POSITIONS", most)
    found = memory_curve(step, 40, CountingAllocator())
    assert {len(sizes) for sizes in found.categories.values()} == {len(found.positions)}
    assert len(found.positions) <= most
    assert found.positions == sorted(found.positions)
    # The same peak as a replay of the whole attempt: the steady state needs most.
    totals = [sum(sizes) for sizes in zip(*found.categories.values(), strict=True)]
    assert max(totals) == replay(step.program.at(40), CountingAllocator()).peak_allocated_bytes
    # Adam's two moments stand next to the parameters from the first event to the last.
    assert set(found.categories["parameters"]) == {parameters()}
    state = found.categories["optimizer state"]
    assert min(state) == max(state) >= 2 * parameters()
    # Gradients of all parameters are there while the second micro-batch runs and the optimizer steps.
    at = found.phases
    assert list(at) == ["forward 1", "backward 1", "forward 2", "backward 2", "optimizer"]
    assert list(at.values()) == sorted(at.values())
    second = next(i for i, position in enumerate(found.positions) if position >= at["forward 2"])
    assert found.categories["gradients"][second] == parameters()
    assert found.categories["gradients"][0] == 0


def test_what_the_allocator_holds_besides(step):
    found = memory_curve(step, 40, CachingAllocator())
    totals = [sum(sizes) for sizes in zip(*found.categories.values(), strict=True)]
    assert max(totals) == replay(step.program.at(40), CachingAllocator()).peak_reserved_bytes
    assert min(found.categories["cached"]) >= 0


def test_peaks_around_the_answer(step):
    found = predicted_points(step, 100, CountingAllocator, cap=110)
    sizes = [point.micro_batch for point in found]
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, 110)
    assert {100, 101} <= set(sizes)
    assert len(sizes) <= curves.POINTS + 2
    for point in found:
        peak = replay(step.program.at(point.micro_batch), CountingAllocator()).peak_allocated_bytes
        assert point.peak_reserved_bytes == peak
    assert [point.micro_batch for point in predicted_points(step, 1, CountingAllocator, cap=1)] == [1]
