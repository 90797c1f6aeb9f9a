"""Chosen samples have the extremes of the costs and the rare labels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.data import default_collate

from autobatch.training.split_check.sample_choice import CANDIDATES, FIRST_CHUNK, SampleChoice
from tests.support.training import Rows, make_setup, make_workload


class Counted(Rows):
    """Rows that count how often they are read."""

    reads = 0

    def __getitem__(self, index: int):
        self.reads += 1
        return super().__getitem__(index)


def choice_of(data, **fields) -> SampleChoice:
    return SampleChoice(make_setup(make_workload(train_data=data, **fields)))


def rows(samples: int, rare: int = 23) -> Counted:
    labels = torch.zeros(samples, dtype=torch.int64)
    labels[rare::50] = 1
    return Counted(torch.randn(samples, 5), labels)


def test_few_samples_are_read_of_much_data() -> None:
    data = rows(10_000)
    choice = choice_of(data)
    assert len(choice) == data.reads == CANDIDATES
    ids = choice.ids(64)
    assert len(set(ids)) == 64
    assert ids == choice_of(data).ids(64)


def test_a_class_of_two_percent_is_met_in_few_samples() -> None:
    data = rows(10_000)
    for size in (8, 64):
        labels = [int(data.columns[1][i]) for i in choice_of(data).ids(size)]
        assert 1 <= sum(labels) < size / 2
        assert labels == sorted(labels), "equal labels are neighbours"


def test_the_cheapest_and_the_most_expensive_are_chosen() -> None:
    lengths = [3 if index == 40 else 9 if index == 70 else 5 for index in range(200)]
    data = [torch.zeros(length) for length in lengths]
    ids = choice_of(data, collate=torch.nn.utils.rnn.pad_sequence).ids(8)
    assert (ids[0], ids[-1]) == (40, 70)


def test_known_costs_find_extremes_that_no_candidate_would_be() -> None:
    data = [torch.zeros(1 if index == 5_000 else 2) for index in range(6_000)]
    workload = make_workload(train_data=data, collate=default_collate, size_of=len)
    setup = make_setup(workload)
    setup.worst_case.size_quartiles()
    assert SampleChoice(setup).ids(2)[0] == 5_000


def test_reading_ends_when_time_is_over() -> None:
    setup = make_setup(make_workload(train_data=rows(500)))
    times = iter(float(second) for second in range(1000))
    slow = replace(setup, clock=lambda: next(times))
    assert len(SampleChoice(slow)) == FIRST_CHUNK
