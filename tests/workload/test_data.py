"""Samples: fetched, collated, and the most expensive ones found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload
from autobatch.workload.data import (
    FIRST_LOOK,
    LONG_SCAN_SECONDS,
    SCAN_SECONDS,
    WorstCaseSampler,
    elements,
    load_micro_batch,
)
from autobatch.workload.user_code import failed_part
from tests.support.training import make_workload


def workload(data: Any, **fields: Any) -> Workload:
    return Workload(
        model=lambda: nn.Linear(1, 1),
        train_data=data,
        loss=lambda _, batch: batch,
        optimizer=lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
        learning_rate=0.1,
        **fields,
    )


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


def first_of(worst_case: WorstCaseSampler, size: int = 1) -> list[int]:
    return worst_case._order[:size]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_the_longest_samples_are_found(lengths: list[int]) -> None:
    data = [[0] * length for length in lengths]
    by_scan = WorstCaseSampler(workload(data))
    by_size = WorstCaseSampler(workload(data, size_of=len))
    longest = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    assert by_scan._order == by_size._order == longest
    assert not by_scan.notes


def test_a_batch_repeats_the_most_expensive_samples_if_the_data_has_fewer() -> None:
    data = [torch.full((n,), float(n)) for n in (1, 3, 2)]
    batch = WorstCaseSampler(workload(data, collate=lambda samples: [len(one) for one in samples])).batch(5)
    assert batch == [3, 2, 1, 3, 2]


def test_equal_sizes_are_read_for_a_short_time_and_noted() -> None:
    data = Slow([7] * 1000)
    worst_case = WorstCaseSampler(workload(data), clock=data.clock)
    assert "of 1,000 samples were read within 5 s: give Workload(size_of=…)" in worst_case.notes[0]
    assert SCAN_SECONDS < data.now <= SCAN_SECONDS + 2


def test_different_sizes_are_read_for_longer() -> None:
    data = Slow([n % 10 for n in range(1000)])
    worst_case = WorstCaseSampler(workload(data), clock=data.clock)
    assert len(worst_case._order) == data.now
    assert LONG_SCAN_SECONDS < data.now <= LONG_SCAN_SECONDS + 2
    assert "within 60 s" in worst_case.notes[0]


def test_a_complete_scan_reads_each_sample_once_and_notes_nothing() -> None:
    data = Slow([1, 9, 4])
    worst_case = WorstCaseSampler(workload(data), clock=data.clock)
    assert (first_of(worst_case, 3), data.now, worst_case.notes) == ([1, 2, 0], 3, [])


def test_the_first_look_is_spread_over_the_data() -> None:
    data = Slow([1] * FIRST_LOOK * 4)
    data.lengths[-4] = 99
    fast = iter(range(10**6))
    worst_case = WorstCaseSampler(workload(data), clock=lambda: next(fast) * SCAN_SECONDS / FIRST_LOOK / 2)
    assert first_of(worst_case) == [FIRST_LOOK * 4 - 4]


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 1e300])
def test_a_size_that_no_sample_can_have_is_refused(size: float) -> None:
    with pytest.raises(InputError, match=r"size_of=…\) returned (nan|inf|1e\+300) for sample 0"):
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
    ],
)
def test_the_numbers_in_a_sample_are_counted(sample: Any, count: int) -> None:
    assert elements(sample) == count


def test_samples_are_collated_by_torchs_default() -> None:
    data = [{"x": np.full(2, n, dtype=np.float32), "y": n} for n in range(4)]
    batch = load_micro_batch(workload(data), [3, 1])
    assert batch["x"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert batch["y"].tolist() == [3, 1]


def test_data_that_can_fetch_many_samples_is_asked_once() -> None:
    asked: list[list[int]] = []

    class Together(Slow):
        def __getitems__(self, ids: list[int]) -> list[Tensor]:
            asked.append(ids)
            return [torch.zeros(1) for _ in ids]

    assert load_micro_batch(workload(Together([1, 1, 1])), range(1, 3)).shape == (2, 1)
    assert asked == [[1, 2]]


def test_other_data_can_be_given() -> None:
    assert load_micro_batch(workload([1]), [0], data=[5]).tolist() == [5]


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
        load_micro_batch(workload(samples), [0, 1])
    assert "\n" not in str(found.value)


def test_samples_of_different_sizes_are_collated_before_a_probe() -> None:
    """The most expensive samples alone have one size, and collate."""
    data = [torch.zeros(3), torch.zeros(3), torch.zeros(2)]
    with pytest.raises(InputError, match=r"found shapes \[\(2,\)\], \[\(3,\)\]: give Workload\(collate"):
        WorstCaseSampler(workload(data)).check_collate()
    WorstCaseSampler(workload(data, collate=torch.nn.utils.rnn.pad_sequence)).check_collate()


def test_out_of_memory_while_collating_is_not_an_error_of_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("autobatch.workload.data.default_collate", starved)
    with pytest.raises(torch.OutOfMemoryError):
        load_micro_batch(workload([torch.zeros(2), torch.zeros(2)]), [0, 1])


def test_errors_of_the_users_functions_pass_and_are_marked() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    class Broken(list[int]):
        __getitem__ = fails  # type: ignore[assignment]

    for part, broken in (("train_data[0]", workload(Broken([1]))), ("collate", workload([1], collate=fails))):
        with pytest.raises(KeyError) as found:
            load_micro_batch(broken, [0])
        assert failed_part(found.value) == part
    with pytest.raises(KeyError) as found:
        WorstCaseSampler(workload([1], size_of=fails)).batch(1)
    assert failed_part(found.value) == "size_of"


def test_an_endless_sample_is_not_read_to_its_end() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    assert elements(endless()) == 1


def test_a_limit_on_the_cost_leaves_out_the_larger_samples() -> None:
    worst_case = WorstCaseSampler(workload([[0] * n for n in (1, 9, 4, 4)]))
    assert first_of(worst_case.limited_to(4), 4) == [2, 3, 0]
    assert first_of(worst_case, 4) == [1, 2, 3, 0]


def test_quartiles_of_the_sizes() -> None:
    data = [[0] * n for n in range(1, 101)]
    assert WorstCaseSampler(workload(data)).size_quartiles() == [25, 50, 75, 100]
    assert WorstCaseSampler(workload([[0]] * 8)).size_quartiles() == []


def test_a_scan_is_seeded_and_leaves_the_generators_alone() -> None:
    def random_size(_: Any) -> float:
        return float(torch.rand(()))

    before = torch.get_rng_state()
    orders = [
        first_of(WorstCaseSampler(workload(list(range(50)), size_of=random_size), seed=seed), 50)
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_costs_are_known_once_they_were_read() -> None:
    workload = make_workload(train_data=[torch.zeros(size) for size in (3, 1, 2)])
    sampler = WorstCaseSampler(workload)
    assert sampler.known_costs == {}
    sampler.size_quartiles()
    assert sampler.known_costs == {0: 3.0, 1: 1.0, 2: 2.0}
