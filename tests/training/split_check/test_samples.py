"""Chosen samples have the extremes of the costs and the rare labels; parts have the content of the whole."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from autobatch.training.split_check.samples import (
    SampleChoice,
    collate_split,
    mixes_samples,
)
from autobatch.workload.data import fetch
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


IDS = [3, 0, 11, 7, 5]


def split(collate=None):
    workload = make_workload(collate=collate)
    return collate_split(workload, fetch(workload.train_data, IDS), [3, 2])


def noisy(samples):
    inputs, labels = default_collate(samples)
    return {"inputs": inputs + torch.randn_like(inputs), "labels": labels, "names": ["one"] * len(samples)}


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {**batch, "count": len(batch["labels"])},
        lambda batch: {**batch, "count": torch.tensor(1)},
        lambda batch: {**batch, "inputs": batch["inputs"].T},
        lambda batch: {**batch, "table": torch.zeros(5, 2)},
    ],
    ids=["count", "tensor", "time first", "table of as many rows"],
)
def test_what_draws_and_cannot_be_cut_has_no_parts(change) -> None:
    assert split(lambda samples: change(noisy(samples))).parts is None


def test_a_collate_function_may_take_entries_out_of_its_samples() -> None:
    class Named:
        def __init__(self) -> None:
            self.rows = [{"id": torch.tensor(i), "name": f"n{i}"} for i in range(12)]

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int):
            return self.rows[index]

    def collate(samples):
        for sample in samples:
            sample.pop("name")
        return default_collate(samples)

    data = Named()
    found = collate_split(make_workload(collate=collate), fetch(data, IDS), [3, 2])
    assert found.whole["id"].tolist() == IDS
    assert all("name" in row for row in data.rows)


def mixup(samples):
    inputs, labels = default_collate(samples)
    share = torch.distributions.Beta(0.8, 0.8).sample()
    order = torch.randperm(len(inputs))
    return share * inputs + (1 - share) * inputs[order], labels, labels[order]


def cutmix_in_some_batches(samples):
    inputs, labels = default_collate(samples)
    if torch.rand(()) < 0.5:
        inputs = torch.cat([inputs[:, :2], inputs.roll(1, 0)[:, 2:]], dim=1)
    return inputs, labels


def masked_tokens(samples):
    inputs, labels = default_collate(samples)
    return inputs * (torch.rand(inputs.shape) < 0.9), labels


def rolled(samples):
    inputs, labels = default_collate(samples)
    return inputs + inputs.roll(1, 0), labels


@pytest.mark.parametrize(
    ("collate", "expected"),
    [(mixup, True), (cutmix_in_some_batches, True), (masked_tokens, False), (rolled, False), (None, False)],
)
def test_a_collate_function_that_mixes_samples_at_random_is_known(collate, expected: bool) -> None:
    workload = make_workload(collate=collate)
    assert mixes_samples(workload, fetch(workload.train_data, range(8))) == expected
