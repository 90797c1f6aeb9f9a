"""The order of the data, against a plain simulation of epochs, and its quality as a permutation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from autobatch import InputError
from autobatch.workload.order import ORDER_VERSION, GlobalBatchSampler, permutation, sampler_of
from tests.support.training import make_workload


def simulate(samples: int, target: int, epochs: int, seed: int) -> list[list[int]]:
    """Draw all batches by a loop over epochs and samples."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for epoch in range(epochs):
        for index in permutation(samples, seed, epoch).tolist():
            batch.append(index)
            if len(batch) == target:
                batches.append(batch)
                batch = []
    if batch:
        batches.append(batch)
    return batches


@settings(max_examples=40)
@given(
    samples=st.integers(1, 40),
    target=st.integers(1, 60),
    epochs=st.integers(1, 5),
    steps=st.none() | st.integers(1, 8),
    data=st.data(),
)
def test_batches_equal_those_of_the_simulation_from_any_start(samples, target, epochs, steps, data) -> None:
    fields = {"samples": samples, "target_batch": target, "seed": 7}
    sampler = GlobalBatchSampler(**fields, epochs=epochs, steps=steps)
    expected = simulate(samples, target, epochs, seed=7)[:steps]
    assert sampler.total == len(expected)
    start = data.draw(st.integers(0, sampler.total))
    assert [batch.ids for batch in sampler.batches(start)] == expected[start:]
    assert [batch.index for batch in sampler.batches(start)] == list(range(start, sampler.total))
    for index, ids in enumerate(expected):
        assert sampler.size(index) == len(ids)
        assert sampler.seen(index) == sum(map(len, expected[:index]))
    # A run that is counted in steps has only full batches.
    endless = simulate(samples, target, -(-8 * target // samples), seed=7)
    counted = GlobalBatchSampler(**fields, steps=steps or 1)
    assert [batch.ids for batch in counted.batches()] == endless[: steps or 1]


def test_the_order_of_version_4_stays() -> None:
    """Raise `ORDER_VERSION` with any other order: a resumed run would repeat some samples and skip others."""
    assert ORDER_VERSION == 4
    assert permutation(8, 0, 0).tolist() == [2, 3, 4, 5, 0, 7, 1, 6]
    assert permutation(8, -1, 10**6).tolist() == [0, 4, 3, 5, 1, 7, 6, 2]
    assert int(permutation(10**5, 2**63, 1)[:1000].sum()) == 51113900


class ByEpoch:
    """A sampler that knows its epoch, as distributed ones do."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.epoch = draw, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.epoch))


class Shuffled:
    """Batches of two in the order of Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(8), 8)
        return iter([order[:2], order[2:4], order[4:6], order[6:]])


def order_of(sampler: Any, seed: int = 0) -> Any:
    return sampler_of(make_workload(train_data=range(12), sampler=sampler), 4, seed).order


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0, 5.0, 2.0] * 4, 30),
        BatchSampler(RandomSampler(range(12), generator=torch.Generator()), 5, drop_last=False),
        Shuffled(),
    ],
)
def test_an_epoch_depends_on_the_seed_and_its_number_alone(sampler: Any) -> None:
    own = getattr(getattr(sampler, "sampler", None), "generator", None) or torch.default_generator
    before = torch.get_rng_state(), random.getstate(), own.get_state()
    order = order_of(sampler, seed=3)
    epochs = [order(number).tolist() for number in (0, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(own.get_state(), before[2])
    torch.rand(3)
    again = order_of(sampler, seed=3)
    assert [again(number).tolist() for number in (2, 1, 0)] == epochs[::-1]
    assert len(set(map(tuple, epochs))) == 3
    assert order_of(sampler, seed=4)(0).tolist() != epochs[0]


def test_batches_are_cut_from_the_order_over_epochs_of_any_length() -> None:
    order = order_of(ByEpoch(lambda epoch: [epoch, 1, 2]))
    assert [order(number).tolist() for number in (0, 5, 0)] == [[0, 1, 2], [5, 1, 2], [0, 1, 2]]
    sampler = GlobalBatchSampler(samples=3, target_batch=4, seed=0, epochs=3, order=order)
    assert [batch.ids for batch in sampler.batches()] == [[0, 1, 2, 1], [1, 2, 2, 1], [2]]
    assert [batch.ids for batch in sampler.batches(1)] == [[1, 2, 2, 1], [2]]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([], "drew no sample in epoch 1: it must draw indices from 0 to 11"),
        ([3, 12], "drew index 12 in epoch 1"),
        ([-1], "drew index -1 in epoch 1"),
        (cycle(range(12)), "drew over 1,200 samples in epoch 1"),
        (ByEpoch(lambda epoch: range(epoch + 1)), "drew 3 samples in epoch 3 and 1 in epoch 1"),
    ],
)
def test_an_invalid_sampler_is_refused(sampler: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(map(order_of(sampler), (0, 2)))
