"""Samples: fetched, collated, and the most expensive ones found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autobatch import InputError
from autobatch.workload.data import WorstCaseSampler
from tests.support.training import make_workload


def sampler(data: Any, seed: int = 0, **fields: Any) -> WorstCaseSampler:
    return WorstCaseSampler(make_workload(train_data=data, **fields), seed=seed)


class Slow:
    """Samples that each take some time of their own clock."""

    def __init__(self, lengths: list[int], seconds: float = 1.0) -> None:
        self.lengths, self.seconds, self.now = lengths, seconds, 0.0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        self.now += self.seconds
        return torch.zeros(self.lengths[index])


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_the_longest_samples_are_found(lengths: list[int]) -> None:
    data = [(index, *[0] * length) for index, length in enumerate(lengths)]
    longest = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for fields in ({}, {"size_of": len}):
        worst_case = sampler(data, collate=lambda rows: [row[0] for row in rows], **fields)
        assert worst_case.batch(len(data) + 1) == [*longest, longest[0]]
        assert not worst_case.notes
        assert worst_case.largest() == (None if len(set(lengths)) == 1 else (longest[0], max(lengths) + 1))
        assert worst_case.sizes().tolist() == [length + 1 for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "seconds", "is_all"),
    [([7] * 1000, 5.0, False), ([n % 10 for n in range(1000)], 60.0, False), ([1, 9, 4], 2, True)],
)
def test_a_scan_ends_in_time_and_says_what_it_left_out(
    lengths, seconds: float, is_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that differ are read for longer. Each sample takes a second, and is read once."""
    data = Slow(lengths)
    monkeypatch.setattr("time.monotonic", lambda: data.now)
    worst_case = sampler(data)
    assert ["of 1,000 samples" in note for note in worst_case.notes] == [True] * (not is_all)
    assert ["have one size" in note for note in worst_case.notes] == [len({*lengths}) == 1] * (not is_all)
    assert seconds < data.now <= seconds + 2
    assert len(worst_case.order) == data.now
    assert (worst_case.sizes() is not None) is is_all


def test_the_first_look_is_spread_over_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Slow([1] * 256, seconds=0.05)
    data.lengths[-4] = 99
    monkeypatch.setattr("time.monotonic", lambda: data.now)
    assert sampler(data).largest() == (252, 99)


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 1e300])
def test_a_size_that_no_sample_can_have_is_refused(size: float) -> None:
    with pytest.raises(InputError, match=r"size_of=…\) returned (nan|inf|1e\+300) for sample 0"):
        sampler([1, 2], size_of=lambda _: size).batch(1)


@pytest.mark.parametrize(
    ("sample", "count"),
    [
        (np.zeros((3, 4)), 12),
        (b"bytes", 5),
        (None, 1),
        ({"ids": [1, 2, 3], "label": torch.tensor(1)}, 4),
        (("text", np.float32(3), torch.zeros(2)), 7),
        (SimpleNamespace(nodes=torch.zeros(5), edges=[torch.zeros(2), torch.zeros(3)]), 10),
        (SimpleNamespace(size=(640, 480)), 640 * 480),  # an image
        ([], 0),
        (iter([1]), 1),  # may have no end
    ],
)
def test_the_numbers_in_a_sample_are_counted(sample: Any, count: int) -> None:
    assert sampler([sample]).sizes() == [count]


@pytest.mark.parametrize("samples", [[torch.zeros(2), torch.zeros(3)], [{"a": 1}, {"b": 2}], [None, None]])
def test_samples_that_cannot_be_collated_are_described_in_one_line(samples: list[Any]) -> None:
    with pytest.raises(InputError, match=r"^the samples cannot .*shapes \[.*: give Workload\(collate=…\)$"):
        sampler(samples).batch(2)


def test_samples_of_different_sizes_are_collated_before_a_probe() -> None:
    """The most expensive samples alone have one size, and collate."""
    data = [torch.zeros(3), torch.zeros(3), torch.zeros(2)]
    with pytest.raises(InputError, match=r"found shapes \[\(2,\)\], \[\(3,\)\]"):
        sampler(data).check_collate()
    sampler(data, sampler=[[0, 1], [2]]).check_collate()
    sampler(data, collate=torch.nn.utils.rnn.pad_sequence).check_collate()


def test_a_scan_is_seeded_and_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        sampler(range(50), seed=seed, size_of=lambda _: float(torch.rand(()))).sizes().tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)
