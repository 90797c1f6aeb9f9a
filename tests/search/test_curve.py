"""Limits of smaller samples, against attempts; and what has none."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from autobatch import Probe, Workload
from autobatch.core.options import Options
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.search import curve
from autobatch.workload.data import WorstCaseSampler
from tests.support.probes import Listener, limit_of, pad, work
from tests.support.probes import Sequences as OfLengths
from tests.support.ragged import Sequences, ragged_workload, simulated_setup, wide_model
from tests.support.training import make_setup


def fits(setup: Setup, micro_batch: int, size: float) -> bool:
    """Make an attempt on the costliest samples of at most a size."""
    small = Subset(setup.workload.train_data, np.flatnonzero(setup.worst_case.sizes() <= size).tolist())
    worst_case = WorstCaseSampler(replace(setup.workload, train_data=small))
    return attempt(replace(setup, worst_case=worst_case), micro_batch).attempt.fits


def of_lengths(lengths: list[int]) -> Workload:
    return work(
        lambda: nn.Linear(4, 16),
        train_data=OfLengths(lengths * 30, width=4),
        collate=pad,
        size_of=lambda sample: sample[0].numel(),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate),
    )


def probe_by_size(workload: Workload, home: Path, progress: Listener | None = None) -> tuple[Setup, Probe]:
    setup = open_setup(workload, Options().with_values(device="cpu", memory_budget="100KiB"))
    return setup, limit_of(setup, home, progress).probe


def test_each_quartile_of_the_sizes_has_its_own_limit(tmp_path: Path) -> None:
    setup, found = probe_by_size(of_lengths([8, 8, 8, 16, 16, 32, 32, 64]), tmp_path)
    assert [limit.size for limit in found.lengths] == [32, 64, 128, 256]
    sizes = [limit.micro_batch for limit in found.lengths]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == found.micro_batch
    for limit in found.lengths:
        assert fits(setup, limit.micro_batch, limit.size)
        assert not fits(setup, limit.micro_batch + 1, limit.size)


def test_limits_on_a_simulated_gpu_grow_for_smaller_samples_and_run(tmp_path: Path) -> None:
    workload = ragged_workload(model=wide_model, train_data=Sequences(samples=240, longest=24))
    setup = simulated_setup(workload, tmp_path, "20MiB")
    found = limit_of(setup, tmp_path).probe
    points = [(limit.size, limit.micro_batch) for limit in found.lengths]
    assert points[-1] == (24.0, found.micro_batch)
    assert all(one[0] < other[0] and one[1] >= other[1] for one, other in itertools.pairwise(points))
    assert points[0][1] > 2 * found.micro_batch
    sizes = setup.worst_case.sizes()
    for size, micro_batch in points[:: len(points) // 3]:
        if micro_batch <= np.count_nonzero(sizes <= size):
            assert fits(setup, micro_batch, size)


def test_few_sizes_suffice_if_one_is_left_to_check_them(tmp_path: Path) -> None:
    setup = make_setup(ragged_workload(train_data=Sequences(longest=4)))
    assert limit_of(setup, tmp_path).probe.lengths


def by_value(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).sum() * float(batch[0].numpy().sum())


@pytest.mark.parametrize(
    ("workload", "seconds"),
    [
        (of_lengths([8, 16, 32, 64]), -1.0),
        (of_lengths([8, 16, 32]), 30.0),
        (of_lengths([16]), 30.0),
        (replace(of_lengths([8, 16, 32, 64]), loss=by_value), 30.0),
    ],
    ids=["too long to trace", "too few sizes", "one size", "needs values"],
)
def test_a_step_that_follows_no_program_of_the_size_has_no_limits_by_size(
    workload: Workload, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "SECONDS", seconds)
    assert probe_by_size(workload, tmp_path)[1].lengths == []


def test_an_interrupt_leaves_out_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(curve, "curve_of", interrupted)
    listener = Listener()
    _, found = probe_by_size(of_lengths([8, 16, 32, 64]), tmp_path, listener)
    assert (found.lengths, found.micro_batch > 1) == ([], True)
    assert any("left out the micro-batches of smaller samples" in note for note in listener.notes)
