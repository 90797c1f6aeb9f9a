"""Limits of smaller samples: by replay, by search, kept, and interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch import Workload
from autobatch.core.progress import Progress
from autobatch.core.records.probe import Probe
from autobatch.search import questions
from autobatch.search.find_limit import find_limit
from autobatch.search.one_probe import ProbeLimits
from autobatch.search.sizes import limits_by_size
from autobatch.search.sizes.limits_by_size import find_limits_by_size
from autobatch.setup.attempt import Outcome, TrainSetup, attempt_at
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import SetupSettings, open_setup
from tests.support.probes import Listener, Sequences, pad, work

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


def probe_by_size(lengths: list[int], home: Path) -> tuple[TrainSetup, Probe]:
    options = SetupSettings(device="cpu", memory_budget="100KiB")
    setup = open_setup(of_lengths(lengths * 30), options)
    process, limits = ThisProcess(setup), ProbeLimits()
    found = find_limit(process, limits, home=home, progress=Progress()).probe
    return setup, find_limits_by_size(process, limits, found, home=home, progress=Progress())


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


def test_a_step_that_is_not_traced_is_searched_at_each_quartile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, traced = probe_by_size(LENGTHS, tmp_path)
    monkeypatch.setattr("autobatch.search.sizes.limits_by_size.find_curve", lambda *_: None)
    _, searched = probe_by_size(LENGTHS, tmp_path / "other")
    assert [(one.size, one.micro_batch) for one in searched.lengths] == [
        (one.size, one.micro_batch) for one in traced.lengths
    ]
    assert all(one.padded_size == one.size * one.micro_batch for one in searched.lengths)


class Packed(nn.Module):
    """A recurrent layer over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 8)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> torch.Tensor:
        return self.body(packed)[0].data.square().mean()


@pytest.mark.parametrize("is_rough", [False, True])
def test_where_only_runs_tell_how_memory_grows_a_search_ends_near_the_limit(
    tmp_path: Path, is_rough: bool
) -> None:
    workload = work(
        Packed,
        train_data=Sequences([4 + n % 23 for n in range(120)], width=4),
        collate=lambda samples: nn.utils.rnn.pack_sequence([one for one, _ in samples], enforce_sorted=False),
        loss=lambda model, packed: model(packed),
    )
    setup = open_setup(workload, SetupSettings(device="cpu", memory_budget="300KiB"))
    process, limits = ThisProcess(setup), ProbeLimits()
    found = find_limit(process, limits, home=tmp_path, progress=Progress()).probe
    *shorter, longest = find_limits_by_size(
        process, limits, found, home=tmp_path, progress=Progress(), is_rough=is_rough
    ).lengths
    assert longest.micro_batch == found.micro_batch
    assert any(one.upper_bound_by is None for one in shorter)
    for one in shorter:
        assert attempt_at(setup, one.micro_batch, one.size).attempt.fits
        assert not attempt_at(setup, one.micro_batch * 5 // 4, one.size).attempt.fits


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


def test_an_interrupt_leaves_out_the_limits_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_setup(of_lengths(LENGTHS * 30), SetupSettings(device="cpu", memory_budget="100KiB"))
    process, limits, listener = ThisProcess(made), ProbeLimits(), Listener()
    found = find_limit(process, limits, home=tmp_path, progress=listener).probe
    sizes: list[float] = []

    def interrupted(_: object, __: int, max_size: float) -> Outcome:
        sizes.append(max_size)
        raise KeyboardInterrupt

    monkeypatch.setattr("autobatch.search.sizes.limits_by_size.find_curve", lambda *_: None)
    monkeypatch.setattr(questions, "run_attempt", interrupted)
    assert find_limits_by_size(process, limits, found, home=tmp_path, progress=listener) is found
    assert sizes == [128]
    assert listener.notes[-1] == "interrupted: left out the micro-batches of smaller samples"


def test_the_same_curve_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = probe_by_size(LENGTHS, tmp_path)
    monkeypatch.setattr(limits_by_size, "find_curve", lambda *_: pytest.fail("computed again"))
    _, again = probe_by_size(LENGTHS, tmp_path)
    assert again.lengths == first.lengths


def test_the_same_quartiles_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_by_size, "find_curve", lambda *_: None)
    _, first = probe_by_size(LENGTHS, tmp_path)
    assert first.lengths
    monkeypatch.setattr(limits_by_size, "search", lambda *_, **__: pytest.fail("searched again"))
    _, again = probe_by_size(LENGTHS, tmp_path)
    assert again.lengths == first.lengths
