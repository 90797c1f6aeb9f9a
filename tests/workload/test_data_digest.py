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
from autobatch.workload.data import check_same_data, digest_data

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


def test_other_values_or_another_order_are_told_apart() -> None:
    def names(*given: Any) -> Any:
        return np.array(given, dtype=object)

    def rows(**changes: Any) -> list[dict[str, Any]]:
        return [
            {"text": f"line {n}", "x": torch.ones(2).bfloat16(), "names": names(f"{n}"), "of": {1, 2}}
            | changes
            for n in range(20)
        ]

    assert digest_data(rows()) == digest_data(rows())
    changed = {"text": "", "x": torch.zeros(2).bfloat16(), "names": names("", None), "of": {"c"}}
    others = [rows(**{key: value}) for key, value in changed.items()]
    for other in (rows()[::-1], rows()[:-1], *others):
        assert digest_data(other) != digest_data(rows())
    data = TensorDataset(torch.zeros(20), IDS)
    first, last = Subset(data, range(19)), Subset(data, [*range(15), 16, 15, 17, 18])
    assert digest_data(first) != digest_data(last), "only the indices differ"


def test_values_that_the_seed_decides_are_compared_and_no_generator_moves() -> None:
    data = Drawn()

    def states() -> str:
        of_torch = [generator.get_state().tolist() for generator in (torch.default_generator, data.own)]
        return repr((random.getstate(), *np.random.get_state(), of_torch))

    before = states()
    assert digest_data(data) == digest_data(Drawn())
    assert states() == before
    assert digest_data(Drawn(unseeded=True)) is None


def test_another_machine_may_round_values_otherwise() -> None:
    here = digest_data(TensorDataset(torch.rand(20), IDS))
    there = msgspec.structs.replace(here, values="other", machine="another")
    check_same_data([here, there, None], ["rank 0", "rank 1", "rank 2"])
    drawn = digest_data(TensorDataset(torch.rand(20), IDS))
    for other in (msgspec.structs.replace(there, samples=21), drawn):
        with pytest.raises(InputError, match=r"of rank 2 are not those of rank 0.*generator="):
            check_same_data([here, there, other], ["rank 0", "rank 1", "rank 2"])
