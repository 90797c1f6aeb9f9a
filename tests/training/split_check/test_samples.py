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


def rows(samples: int, rare: int = 23) -> Counted:
    labels = torch.zeros(samples, dtype=torch.int64)
    labels[rare::50] = 1
    return Counted(torch.randn(samples, 5), labels)


def test_known_costs_find_extremes_that_no_candidate_would_be() -> None:
    data = [torch.zeros(1 if index == 5_000 else 2) for index in range(6_000)]
    workload = make_workload(train_data=data, collate=default_collate, size_of=len)
    setup = make_setup(workload)
    setup.worst_case.sizes()
    assert SampleChoice(setup).ids(2)[0] == 5_000


IDS = [3, 0, 11, 7, 5]


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
