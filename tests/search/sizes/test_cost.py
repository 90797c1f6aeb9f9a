"""The cost of a micro-batch: an exact fit of known costs, and a measurement that changes nothing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from autobatch.core.records.plan import MicroBatchCost
from autobatch.search.sizes.cost import TimedShape, fit_cost, measure_cost
from autobatch.search.sizes.plan_split import seconds_of
from tests.support.ragged import ragged_workload
from tests.support.training import fingerprint, make_setup

SHAPES = list(itertools.product((1, 3, 8), (4.0, 40.0, 200.0)))


@pytest.mark.parametrize(
    "cost",
    [
        MicroBatchCost(fixed=0.01, per_sample=0.001, per_size=2e-4, per_size_squared=3e-7),
        MicroBatchCost(fixed=0.002, per_size=2e-4),
        MicroBatchCost(fixed=0.5),
    ],
)
def test_a_known_cost_is_found_again(cost: MicroBatchCost) -> None:
    found = fit_cost([TimedShape(m, size, seconds_of(cost, m, size)) for m, size in SHAPES])
    for m, size in [*SHAPES, (20, 77.0)]:
        assert seconds_of(found, m, size) == pytest.approx(seconds_of(cost, m, size), rel=1e-6)


def test_half_of_the_smallest_time_is_fixed_at_least() -> None:
    cost = MicroBatchCost(fixed=0.0, per_size=2e-4)
    found = fit_cost([TimedShape(m, size, seconds_of(cost, m, size)) for m, size in SHAPES])
    assert found.fixed >= 0.5 * seconds_of(cost, 1, 4.0)
    assert seconds_of(found, 8, 200.0) == pytest.approx(seconds_of(cost, 8, 200.0), rel=0.05)


def test_no_term_is_negative_whatever_was_measured() -> None:
    draw = random.Random(0)
    for _ in range(50):
        found = fit_cost([TimedShape(m, size, draw.uniform(0.01, 1.0)) for m, size in SHAPES])
        assert min(found.fixed, found.per_sample, found.per_size, found.per_size_squared) >= 0


def test_a_measurement_leaves_the_model_and_the_generators_alone() -> None:
    setup = make_setup(ragged_workload())
    before, drawn = fingerprint(setup.model), torch.get_rng_state()
    sizes = setup.worst_case.sizes()
    cost = measure_cost(setup, sizes, 6)
    assert cost is not None
    assert seconds_of(cost, 6, float(sizes.max())) > 0
    assert fingerprint(setup.model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in setup.model.parameters())


def test_a_measurement_that_runs_out_of_memory_gives_no_cost() -> None:
    def loss(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    setup = make_setup(ragged_workload(loss=loss))
    assert measure_cost(setup, np.asarray(setup.worst_case.sizes()), 4) is None
