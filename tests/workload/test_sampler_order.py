"""The order that a sampler draws: repeatable, and without a trace in any generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from autobatch.core.errors import InputError
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.sampler_order import SamplerOrder, epoch_of
from tests.support.training import make_workload


class ByEpoch:
    """A sampler that knows its epoch, as distributed ones do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, 1, 2])


class Shuffled:
    """Batches of two in the order of Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(8), 8)
        return iter([order[:2], order[2:4], order[4:6], order[6:]])


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0, 5.0, 2.0] * 4, 30),
        WeightedRandomSampler([1.0, 5.0, 2.0] * 4, 30, generator=torch.Generator()),
        SubsetRandomSampler([1, 5, 7, 9]),
        Shuffled(),
    ],
)
def test_an_epoch_depends_on_the_seed_and_its_number_alone(sampler: Any) -> None:
    before = (torch.get_rng_state(), random.getstate())
    own = getattr(sampler, "generator", None)
    state = None if own is None else own.get_state()
    order = SamplerOrder(sampler, 12, seed=3)
    epochs = [order(number) for number in (0, 1, 2)]
    torch.rand(3)
    again = SamplerOrder(sampler, 12, seed=3)
    assert [again(number) for number in (2, 1, 0)] == epochs[::-1]
    assert len({tuple(one) for one in epochs}) == 3
    assert SamplerOrder(sampler, 12, seed=4)(0) != epochs[0]
    assert random.getstate() == before[1]
    if own is not None:
        assert torch.equal(own.get_state(), state)


def test_drawing_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    SamplerOrder(SubsetRandomSampler([1, 5, 7]), 12, seed=3)(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_is_told_its_epoch() -> None:
    order = SamplerOrder(ByEpoch(), 12, seed=0)
    assert [order(0), order(5), order(0)] == [[0, 1, 2], [5, 1, 2], [0, 1, 2]]


def test_batches_are_cut_from_the_order_over_epochs() -> None:
    order = SamplerOrder(ByEpoch(), 12, seed=0)
    sampler = GlobalBatchSampler(samples=3, target_batch=4, seed=0, epochs=3, order=order)
    assert [batch.ids for batch in sampler.batches()] == [[0, 1, 2, 1], [1, 2, 2, 1], [2]]
    assert [batch.ids for batch in sampler.batches(1)] == [[1, 2, 2, 1], [2]]


def test_an_epoch_may_be_longer_than_the_data() -> None:
    workload = replace(make_workload(), sampler=WeightedRandomSampler([1.0] * 24, 100))
    samples, order = epoch_of(workload, 0)
    assert samples == 100
    assert order is not None
    assert set(order(0)) <= set(range(24))
    assert epoch_of(make_workload(), 0) == (24, None)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([], "drew no sample in epoch 1: it must draw indices from 0 to 11"),
        ([3, 12], "drew 12 in epoch 1"),
        ([-1], "drew -1 in epoch 1"),
        (["a"], "drew a str: it must draw indices"),
    ],
)
def test_an_invalid_sampler_is_refused(sampler: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplerOrder(sampler, 12, seed=0)


def test_a_sampler_without_an_end_is_refused() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return (number % 12 for number in count())

    with pytest.raises(InputError, match="drew over 12,000 samples in epoch 1"):
        SamplerOrder(Endless(), 12, seed=0)


def test_epochs_of_different_lengths_are_refused() -> None:
    class Growing(ByEpoch):
        def __iter__(self) -> Iterator[int]:
            return iter(range(self.epoch + 1))

    order = SamplerOrder(Growing(), 12, seed=0)
    with pytest.raises(InputError, match="drew 3 samples in epoch 3 and 1 in epoch 1"):
        order(2)
