"""Curves of the largest micro-batch over size, against attempts; and what is not traced."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from autobatch import Probe, Progress, Workload
from autobatch.core.largest import halving, largest
from autobatch.core.options import Options
from autobatch.footprint.program import Untraceable
from autobatch.search import curve
from autobatch.search.curve import curve_of, trace_sizes
from autobatch.search.find_limit import find_limit
from autobatch.setup.attempt import Outcome, attempt
from autobatch.setup.session import ThisProcess
from autobatch.setup.setup import Setup, open_setup
from autobatch.setup.trace import setting_of
from autobatch.workload.data import WorstCaseSampler
from tests.support.probes import Sequences as OfLengths
from tests.support.probes import pad, work
from tests.support.ragged import Sequences, ragged_workload, simulated_setup, wide_model
from tests.support.training import make_setup

WORKLOAD = ragged_workload(model=wide_model, train_data=Sequences(samples=240, longest=24))


def attempt_at(setup: Setup, micro_batch: int, size: float | None) -> Outcome:
    """Make an attempt on the costliest samples of at most a size; None for no limit."""
    if size is not None:
        small = Subset(setup.workload.train_data, np.flatnonzero(setup.worst_case.sizes() <= size).tolist())
        setup = replace(setup, worst_case=WorstCaseSampler(replace(setup.workload, train_data=small)))
    return attempt(setup, micro_batch)


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


# Limits of smaller samples in a probe.

LENGTHS = [8, 8, 8, 16, 16, 32, 32, 64]


def of_lengths(lengths: list[int]) -> Workload:
    return work(
        lambda: nn.Linear(4, 16),
        train_data=OfLengths(lengths, width=4),
        collate=pad,
        size_of=lambda sample: sample[0].numel(),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate),
    )


def probe_by_size(lengths: list[int], home: Path) -> tuple[Setup, Probe]:
    options = Options().with_values(device="cpu", memory_budget="100KiB")
    setup = open_setup(of_lengths(lengths * 30), options)
    return setup, find_limit(ThisProcess(setup), Options(), home=home, progress=Progress()).probe


def test_each_quartile_of_the_sizes_has_its_own_limit(tmp_path: Path) -> None:
    """The oracle is attempts on samples of those lengths alone."""
    setup, found = probe_by_size(LENGTHS, tmp_path)
    assert [limit.size for limit in found.lengths] == [32, 64, 128, 256]
    sizes = [limit.micro_batch for limit in found.lengths]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == found.micro_batch
    for limit in found.lengths:
        assert attempt_at(setup, limit.micro_batch, limit.size).attempt.fits
        assert not attempt_at(setup, limit.micro_batch + 1, limit.size).attempt.fits


def test_a_step_that_is_not_traced_has_no_limits_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "trace_setup", lambda *_: None)
    assert probe_by_size(LENGTHS, tmp_path)[1].lengths == []


def test_an_interrupt_leaves_out_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(curve, "curve_of", interrupted)
    _, found = probe_by_size(LENGTHS, tmp_path)
    assert found.lengths == []


def test_samples_of_one_size_have_no_limits_by_size(tmp_path: Path) -> None:
    setup, found = probe_by_size([16], tmp_path)
    assert setup.worst_case.largest() is None
    assert found.lengths == []
