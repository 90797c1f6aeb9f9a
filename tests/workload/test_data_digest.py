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
from autobatch.workload.data_digest import DataDigest, check_same_data, digest_data

IDS = torch.arange(20)


class Drawn:
    """Samples with draws of the global generators and of one of its own."""

    def __init__(self, *, unseeded: bool = False) -> None:
        self.own, self.unseeded = torch.Generator(), unseeded

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        drawn = {"torch": torch.rand(2, generator=self.own), "numpy": np.random.rand(2), "x": random.random()}
        return [drawn, np.random.default_rng().random() if self.unseeded else index]


def digest(data: Any) -> DataDigest:
    found = digest_data(data)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[::-1],
        lambda rows: rows[:-1],
        lambda rows: [{**row, "text": row["text"] + "."} for row in rows],
        lambda rows: [{**row, "image": row["image"] + 1e-3} for row in rows],
        lambda rows: [{**row, "names": {"a", "c"}} for row in rows],
    ],
)
def test_other_values_or_another_order_are_told_apart(change) -> None:
    rows = [
        {"text": f"line {n}", "image": torch.full((2,), n).bfloat16(), "names": {"a", "b"}, "id": (n, None)}
        for n in range(20)
    ]
    assert digest(rows) == digest(rows)
    assert not digest(change(rows)).is_same(digest(rows))


def test_the_indices_of_a_subset_tell_it_from_others_that_begin_alike() -> None:
    data = TensorDataset(torch.zeros(20), IDS)
    own, other = list(range(20)), [0, 2, 1, *range(3, 20)]
    assert not digest(Subset(data, own)).is_same(digest(Subset(data, other)))
    assert not digest(Subset(Subset(data, other), own)).is_same(digest(Subset(Subset(data, own), own)))


def test_values_that_the_seed_decides_are_compared_and_no_generator_moves() -> None:
    data = Drawn()

    def states() -> str:
        of_torch = [generator.get_state().tolist() for generator in (torch.default_generator, data.own)]
        return repr((random.getstate(), *np.random.get_state(), of_torch))

    before = states()
    assert digest(data) == digest(Drawn())
    assert states() == before
    assert digest_data(Drawn(unseeded=True)) is None


def test_another_machine_may_round_values_otherwise_but_has_the_same_texts_and_numbers() -> None:
    here = digest(TensorDataset(torch.rand(20), IDS))
    there = msgspec.structs.replace(here, computed="other", machine="another")
    check_same_data([here, there, None], ["rank 0", "rank 1", "rank 2"])
    other = digest(TensorDataset(torch.rand(20), IDS.flip(0)))
    with pytest.raises(InputError, match=r"of rank 2 are not those of rank 0.*generator="):
        check_same_data([here, there, other], ["rank 0", "rank 1", "rank 2"])
