"""Data are told apart by a few samples, and reading them leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from autobatch import InputError
from autobatch.workload.data_digest import check_same_data, digest_data

IDS = torch.arange(20)


class Drawn:
    """Samples of every kind, with draws of the global generators and of one of its own."""

    def __init__(self, *, own: bool = False, unseeded: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(5) if own else None
        self.unseeded = unseeded

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2, generator=self.generator)
        drawn = {"noise": noise, "more": np.random.rand(2), "python": random.random()}
        return [drawn, np.random.default_rng().random() if self.unseeded else index]


def digest(data: Any) -> Any:
    found = digest_data(data)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[::-1],
        lambda rows: rows[:-1],
        lambda rows: [rows[0], *rows[2:], rows[1]],
        lambda rows: [{**row, "text": row["text"] + "."} for row in rows],
        lambda rows: [{**row, "image": row["image"] + 1e-3} for row in rows],
        lambda rows: [{**row, "names": {"a", "c"}} for row in rows],
    ],
)
def test_other_values_or_another_order_are_told_apart(change) -> None:
    rows = [
        {
            "text": f"line {n}",
            "image": torch.full((2,), float(n)).bfloat16(),
            "names": {"a", "b"},
            "id": (n, None),
        }
        for n in range(20)
    ]
    first = digest(rows)
    assert first == digest(rows)
    assert not digest(change(rows)).is_same(first)


def test_the_indices_of_a_subset_tell_it_from_others_that_begin_alike() -> None:
    data = TensorDataset(torch.zeros(20), IDS)
    one, other = list(range(20)), [0, 2, 1, *range(3, 20)]
    assert not digest(Subset(data, one)).is_same(digest(Subset(data, other)))
    assert not digest(Subset(Subset(data, other), one)).is_same(digest(Subset(Subset(data, one), one)))


def test_values_that_the_seed_decides_are_compared() -> None:
    found, data = digest(Drawn()), Drawn(own=True)
    assert found == digest(Drawn())
    assert digest_data(Drawn(unseeded=True)) is None
    before = random.getstate(), *(one.get_state() for one in (torch.default_generator, data.generator))
    of_numpy = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    digest_data(data)
    assert random.getstate() == before[0], "reading leaves every generator as it was"
    assert np.random.get_state()[1].tolist() == of_numpy  # type: ignore[union-attr]
    assert torch.default_generator.get_state().equal(before[1])
    assert data.generator.get_state().equal(before[2])


def test_another_machine_may_round_values_otherwise_but_has_the_same_texts_and_numbers() -> None:
    here = digest(TensorDataset(torch.rand(20), IDS))
    there = msgspec.structs.replace(here, computed="other", machine="another")
    assert there.is_same(here)
    check_same_data([here, there, None], ["rank 0", "rank 1", "rank 2"])
    other = digest(TensorDataset(torch.rand(20), IDS.flip(0)))
    with pytest.raises(InputError, match=r"of rank 2 are not those of rank 0.*PYTHONHASHSEED=0.*generator="):
        check_same_data([here, there, other], ["rank 0", "rank 1", "rank 2"])
