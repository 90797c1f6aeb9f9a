"""Curves of the largest micro-batch over size, against attempts; and what is not traced."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autobatch.core.largest import halving, largest
from autobatch.footprint.program import Untraceable
from autobatch.search.sizes.curve import curve_of, trace_sizes
from autobatch.setup.attempt import attempt_at
from autobatch.setup.trace import setting_of
from tests.support.ragged import Sequences, ragged_workload, simulated_setup, wide_model
from tests.support.training import make_setup

WORKLOAD = ragged_workload(model=wide_model, train_data=Sequences(samples=240, longest=24))


def test_a_curve_grows_for_smaller_samples_and_its_points_run(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, "20MiB")
    sizes = setup.worst_case.sizes()
    program = trace_sizes(setting_of(setup), sizes)
    assert program.is_exact
    limit = largest(lambda m: attempt_at(setup, m, None).attempt.fits, 0, 401, halving)
    points = curve_of(program, sizes, setup.device.new_allocator, limit=limit, cap=4000)
    assert [point.size for point in points] == sorted({point.size for point in points})
    assert points[-1] == (24.0, limit)
    assert all(a.micro_batch >= b.micro_batch for a, b in itertools.pairwise(points))
    assert points[0].micro_batch > 2 * limit
    for size, micro_batch in points[:: len(points) // 3]:
        own = np.flatnonzero(sizes <= size)
        if micro_batch <= len(own):
            assert attempt_at(setup, micro_batch, size).attempt.fits


def test_a_step_that_takes_too_long_to_trace_is_refused() -> None:
    setup = make_setup(WORKLOAD)
    ticks = itertools.count(step=60.0)
    with pytest.raises(Untraceable, match="would take"):
        trace_sizes(setting_of(setup), setup.worst_case.sizes(), clock=lambda: next(ticks))


@pytest.mark.parametrize("longest", [4, 5, 6, 9])
def test_few_sizes_suffice_if_one_is_left_to_check_them(longest: int) -> None:
    setup = make_setup(ragged_workload(train_data=Sequences(longest=longest)))
    assert trace_sizes(setting_of(setup), setup.worst_case.sizes()).is_exact


def test_too_few_sizes_determine_no_program() -> None:
    setup = make_setup(ragged_workload(train_data=Sequences(longest=3)))
    with pytest.raises(Untraceable, match="only 3 different sizes"):
        trace_sizes(setting_of(setup), setup.worst_case.sizes())


def test_a_step_that_needs_values_is_refused() -> None:
    def loss(model, batch):
        return model(batch[0]).sum() * float(batch[0].numpy().sum())

    setup = make_setup(WORKLOAD)
    setting = setting_of(replace(setup, workload=ragged_workload(loss=loss)))
    with pytest.raises(Untraceable, match="without values"):
        trace_sizes(setting, setup.worst_case.sizes())
