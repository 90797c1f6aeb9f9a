"""Samples: fetched, collated, and the most expensive ones found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autobatch import InputError, Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.user_code import failed_part
from tests.support.training import make_workload


def workload(data: Any, **fields: Any) -> Workload:
    return make_workload(train_data=data, **fields)


class Slow:
    """Samples that each take a second of their own clock."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.now = 0.0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        self.now += 1.0
        return torch.zeros(self.lengths[index])

    def clock(self) -> float:
        return self.now


def indices(data: Any, **fields: Any) -> WorstCaseSampler:
    """Return a sampler whose micro-batches are the indices of the samples."""
    numbered = [(index, *one) if isinstance(one, list) else one for index, one in enumerate(data)]
    return WorstCaseSampler(workload(numbered, collate=lambda rows: [row[0] for row in rows], **fields))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_the_longest_samples_are_found(lengths: list[int]) -> None:
    data = [[0] * length for length in lengths]
    longest = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for worst_case in (indices(data), indices(data, size_of=len)):
        assert worst_case.batch(len(data) + 1) == [*longest, longest[0]]
        assert not worst_case.notes
        assert worst_case.largest() == (None if len(set(lengths)) == 1 else (longest[0], max(lengths) + 1))
    assert indices(data).sizes().tolist() == [length + 1 for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "seconds", "is_all"),
    [([7] * 1000, 5.0, False), ([n % 10 for n in range(1000)], 60.0, False), ([1, 9, 4], 2, True)],
)
def test_a_scan_ends_in_time_and_says_what_it_left_out(lengths, seconds: float, is_all: bool) -> None:
    """Sizes that differ are read for longer. Each sample takes a second, and is read once."""
    data = Slow(lengths)
    worst_case = WorstCaseSampler(workload(data), clock=data.clock)
    assert ["of 1,000 samples" in note for note in worst_case.notes] == [True] * (not is_all)
    assert seconds < data.now <= seconds + 2
    assert len(worst_case.order) == data.now
    assert (worst_case.sizes() is not None) is is_all


def test_the_first_look_is_spread_over_the_data() -> None:
    data = Slow([1] * 256)
    data.lengths[-4] = 99
    fast = iter(range(10**6))
    worst_case = WorstCaseSampler(workload(data), clock=lambda: next(fast) / 25)
    assert worst_case.largest() == (252, 99)


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 1e300, "long"])
def test_a_size_that_no_sample_can_have_is_refused(size: object) -> None:
    with pytest.raises(InputError, match=r"size_of=…\) returned ('long'|nan|inf|1e\+300) for sample 0"):
        WorstCaseSampler(workload([1, 2], size_of=lambda _: size)).batch(1)


@dataclass
class Graph:
    nodes: Tensor
    edges: list[Tensor]
    name: str = "graph"


class Picture:
    size = (640, 480)


@pytest.mark.parametrize(
    ("sample", "count"),
    [
        (torch.zeros(3, 4), 12),
        (np.zeros((3, 4)), 12),
        ([1, 2, 3], 3),
        ("words", 5),
        (b"bytes", 5),
        (7, 1),
        (None, 1),
        (np.float32(3), 1),
        ({"ids": [1, 2, 3], "label": torch.tensor(1)}, 4),
        (("text", np.zeros(5), torch.zeros(2)), 11),
        (Graph(torch.zeros(5), [torch.zeros(2), torch.zeros(3)]), 10),
        (Picture(), 640 * 480),
        ([], 0),
        (iter([1]), 1),  # may have no end
    ],
)
def test_the_numbers_in_a_sample_are_counted(sample: Any, count: int) -> None:
    assert WorstCaseSampler(workload([sample])).sizes() == [count]


def test_data_that_can_fetch_many_samples_is_asked_once() -> None:
    asked: list[list[int]] = []

    class Together(Slow):
        def __getitems__(self, ids: list[int]) -> list[Tensor]:
            asked.append(ids)
            return [torch.zeros(1) for _ in ids]

    assert WorstCaseSampler(workload(Together([1, 2, 3]))).batch(2).shape == (2, 1)
    assert asked == [[2, 1]]


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ((torch.ones(4, 3), torch.zeros(4)), "a tuple of 2"),
        ({"x": torch.ones(4, 3)}, "a dict of 1"),
        (None, r"nothing \(None\)"),
    ],
)
def test_data_that_make_their_own_batches_are_refused_in_one_line(made: Any, found: str) -> None:
    class Batches(Slow):
        def __getitems__(self, ids: list[int]) -> Any:
            return made

    message = f"train_data.__getitems__ got 4 indices and returned {found}, which looks like a batch"
    with pytest.raises(InputError, match=message):
        WorstCaseSampler(workload(Batches([3] * 8))).batch(4)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.zeros(3)],
        [{"a": torch.zeros(1)}, {"b": torch.zeros(2)}],
        [[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]],
        [object(), object()],
        [None, None],
    ],
)
def test_samples_that_cannot_be_collated_are_described_in_one_line(samples: list[Any]) -> None:
    with pytest.raises(
        InputError, match=r"cannot be collated.*found shapes \[.*: give Workload\(collate"
    ) as found:
        WorstCaseSampler(workload(samples)).batch(2)
    assert "\n" not in str(found.value)


def test_samples_of_different_sizes_are_collated_before_a_probe() -> None:
    """The most expensive samples alone have one size, and collate."""
    data = [torch.zeros(3), torch.zeros(3), torch.zeros(2)]
    with pytest.raises(InputError, match=r"found shapes \[\(2,\)\], \[\(3,\)\]: give Workload\(collate"):
        WorstCaseSampler(workload(data, sampler=[0, 1, 2])).check_collate()
    WorstCaseSampler(workload(data, sampler=[[0, 1], [2]])).check_collate()
    WorstCaseSampler(workload(data, collate=torch.nn.utils.rnn.pad_sequence)).check_collate()


def test_errors_of_the_users_functions_pass_and_are_marked() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    class Broken(list[int]):
        __getitem__ = fails  # type: ignore[assignment]

    for part, broken in (("train_data[0]", workload(Broken([1]))), ("collate", workload([1], collate=fails))):
        with pytest.raises(KeyError) as found:
            WorstCaseSampler(broken).batch(1)
        assert failed_part(found.value) == part
    with pytest.raises(KeyError) as found:
        WorstCaseSampler(workload([1], size_of=fails)).batch(1)
    assert failed_part(found.value) == "size_of"


def test_a_scan_is_seeded_and_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    data = list(range(50))
    first, again, other = (
        WorstCaseSampler(workload(data, size_of=lambda _: float(torch.rand(()))), seed=seed).sizes()
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
