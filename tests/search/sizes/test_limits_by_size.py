"""Limits of smaller samples: by replay, by search, kept, and interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch import Workload
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Probe
from autobatch.search.find_limit import find_limit
from autobatch.search.sizes.limits_by_size import find_limits_by_size
from autobatch.setup.attempt import attempt_at
from autobatch.setup.session import ThisProcess
from autobatch.setup.setup import Setup, open_setup
from tests.support.probes import Sequences, pad, work

LENGTHS = [8, 8, 8, 16, 16, 32, 32, 64]


def of_lengths(lengths: list[int]) -> Workload:
    return work(
        lambda: nn.Linear(4, 16),
        train_data=Sequences(lengths, width=4),
        collate=pad,
        size_of=lambda sample: sample[0].numel(),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate),
    )


def probe_by_size(lengths: list[int], home: Path) -> tuple[Setup, Probe]:
    options = Options().with_values(device="cpu", memory_budget="100KiB")
    setup = open_setup(of_lengths(lengths * 30), options)
    process, limits = ThisProcess(setup), Options()
    found = find_limit(process, limits, home=home, progress=Progress()).probe
    return setup, find_limits_by_size(process, limits, found, progress=Progress())


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
    monkeypatch.setattr("autobatch.search.sizes.limits_by_size.find_curve", lambda *_: None)
    assert probe_by_size(LENGTHS, tmp_path)[1].lengths == []


def test_an_interrupt_leaves_out_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autobatch.search.sizes.limits_by_size.find_curve", interrupted)
    _, found = probe_by_size(LENGTHS, tmp_path)
    assert found.lengths == []


def test_samples_of_one_size_have_no_limits_by_size(tmp_path: Path) -> None:
    setup, found = probe_by_size([16], tmp_path)
    assert setup.worst_case.size_quartiles() == []
    assert found.lengths == []
