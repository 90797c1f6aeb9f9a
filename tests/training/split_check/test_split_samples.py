"""The parts of a collated batch have the content of the whole."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from autobatch.training.split_check.split_samples import collate_split
from autobatch.workload.data import fetch
from tests.support.training import make_workload, points

IDS = [3, 0, 11, 7, 5]


def split(collate=None):
    workload = make_workload(collate=collate)
    return collate_split(workload, fetch(workload.train_data, IDS), [3, 2])


def noisy(samples):
    inputs, labels = default_collate(samples)
    return {"inputs": inputs + torch.randn_like(inputs), "labels": labels, "names": ["one"] * len(samples)}


def test_a_collate_function_without_draws_collates_the_parts() -> None:
    found = split()
    data = points()
    assert found.collated is not None
    for (batch, size), ids in zip(found.parts, (IDS[:3], IDS[3:]), strict=True):
        assert size == len(ids)
        for mine, column in zip(batch, data.columns, strict=True):
            assert torch.equal(mine, column[ids])


def test_what_draws_is_cut_from_the_whole() -> None:
    found = split(noisy)
    assert found.collated is None
    (one, first), (other, second) = found.parts
    assert (first, second) == (3, 2)
    for name in ("inputs", "labels"):
        assert torch.equal(torch.cat([one[name], other[name]]), found.whole[name])
    assert one["names"] == ["one"] * 3


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
