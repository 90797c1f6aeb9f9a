"""The order of the data, against a plain simulation of epochs, and its quality as a permutation."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from autobatch import InputError
from autobatch.workload.order import (
    ORDER_VERSION,
    GlobalBatchSampler,
    SamplerOrder,
    permutation,
)


def simulate(samples: int, target: int, epochs: int, seed: int) -> list[list[int]]:
    """Draw all batches by a loop over epochs and samples."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for epoch in range(epochs):
        for index in permutation(samples, seed=seed, epoch=epoch):
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


# The permutation of an epoch, computed and not stored.


def test_every_sample_comes_exactly_once_in_an_epoch() -> None:
    around_powers = [2**bits + more for bits in (9, 12, 13, 16) for more in (-1, 0, 1)]
    for count in (*range(1, 301), *around_powers, 10**6):
        ids = torch.tensor(permutation(count, seed=count % 5, epoch=count % 3))
        assert torch.equal(ids.sort().values, torch.arange(count)), count


def by_hand(place: int, *, samples: int, seed: int, epoch: int) -> int:
    """Return the sample at a place in plain integers, with the constants of the published hash functions."""

    def mix(state: int) -> int:  # SplitMix64
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    def hashed(half: int, key: int) -> int:  # lowbias32, with a half of the key before each product
        half ^= key % 2**32
        half = (half ^ half >> 16) * 0x7FEB352D % 2**32
        half ^= key >> 32
        half = (half ^ half >> 15) * 0x846CA68B % 2**32
        return half ^ half >> 16

    bits = (samples - 1).bit_length()
    low_bits = bits - bits // 2
    base = mix(mix(seed % 2**64) + epoch)
    keys = [mix(base + 0x9E3779B97F4A7C15 * number) for number in range(1, 21 if bits <= 12 else 9)]
    while True:
        high, low = divmod(place, 2**low_bits)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            high ^= hashed(low, even) % 2 ** (bits - low_bits)
            low ^= hashed(high, odd) % 2**low_bits
        place = high * 2**low_bits + low
        if place < samples:
            return place


@pytest.mark.parametrize("samples", [1, 2, 10, 100, 10**6, 10**9, 2**40 + 1, 2**61 + 12_345])
def test_the_order_of_version_2_equals_one_in_plain_integers_without_overflow(samples: int) -> None:
    """Raise `ORDER_VERSION` with any other order: a resumed run would repeat some samples and skip others."""
    assert ORDER_VERSION == 2
    for seed, epoch in ((0, 0), (7, 3), (-1, 10**6), (2**63, 1)):
        for start in (0, samples // 2, max(0, samples - 3)):
            stop = min(start + 3, samples)
            expected = [by_hand(p, samples=samples, seed=seed, epoch=epoch) for p in range(start, stop)]
            assert permutation(samples, seed=seed, epoch=epoch, start=start, stop=stop) == expected


@pytest.mark.parametrize("samples", [4096, 4097, 100_003])
def test_neighbours_are_not_correlated(samples: int) -> None:
    """In a random permutation half of the steps ascend, and a step of 1 has the probability 2 / samples."""
    orders = torch.tensor([permutation(samples, seed=1, epoch=epoch) for epoch in range(8)])
    steps = orders.diff()
    count = steps.numel()
    assert abs((steps > 0).double().mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / count)
    neighbours = (steps.abs() == 1).sum().item()
    assert abs(neighbours - 2 * count / samples) < 5 * math.sqrt(2 * count / samples)
    first, second = orders[:, :-1].double().flatten(), orders[:, 1:].double().flatten()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 5 / math.sqrt(count)
    # Orders of two epochs, and of two seeds, agree at one place on average.
    other = torch.tensor(permutation(samples, seed=2, epoch=0))
    assert (orders[0] == orders[1]).sum() < 8
    assert (orders[0] == other).sum() < 8
    assert abs(torch.corrcoef(torch.stack([orders[0], orders[1]]).double())[0, 1]) < 5 / math.sqrt(samples)


@pytest.mark.parametrize("target", [1000, 4097, 30_000])
def test_batches_of_large_data_are_parts_of_the_order(target: int) -> None:
    samples = 2**16 + 100
    sampler = GlobalBatchSampler(samples=samples, target_batch=target, seed=9, epochs=4)
    ids = [one for epoch in range(4) for one in permutation(samples, seed=9, epoch=epoch)]
    assert [batch.ids for batch in sampler.batches()] == [
        ids[start : start + target] for start in range(0, len(ids), target)
    ]


def test_a_billion_samples_are_resumed_anywhere_without_a_list_of_the_epoch() -> None:
    sampler = GlobalBatchSampler(samples=10**9, target_batch=1024, seed=0, epochs=3)
    tracemalloc.start()
    batch = next(sampler.batches(sampler.total - 2))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (batch.epoch, len(set(batch.ids))) == (2, 1024)
    assert peak_bytes < 2**20


# The order that a sampler of the user's draws.


class ByEpoch:
    """A sampler that knows its epoch, as distributed ones do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, 1, 2])


class Growing(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch + 1))


class Endless:
    def __iter__(self) -> Iterator[int]:
        return cycle(range(12))


class Shuffled:
    """Batches of two in the order of a generator of its own, or of Python's."""

    def __init__(self, own: Any = None) -> None:
        self.own = own

    def __iter__(self) -> Iterator[list[int]]:
        order = (self.own or random).sample(range(8), 8)
        return iter([order[:2], order[2:4], order[4:6], order[6:]])


class Permuted(Shuffled):
    """Samples in the order of a generator of NumPy, in an object that it holds."""

    def __init__(self, own: Any) -> None:
        self.held = Shuffled(own)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held.own.permutation(8))


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0, 5.0, 2.0] * 4, 30),
        WeightedRandomSampler([1.0, 5.0, 2.0] * 4, 30, generator=torch.Generator()),
        BatchSampler(RandomSampler(range(12), generator=torch.Generator()), 5, drop_last=False),
        SubsetRandomSampler([1, 5, 7, 9]),
        Shuffled(),
        Shuffled(random.Random(3)),
        Permuted(np.random.default_rng(3)),
    ],
)
def test_an_epoch_depends_on_the_seed_and_its_number_alone(sampler: Any) -> None:
    own = getattr(sampler, "generator", None) or torch.default_generator
    before = torch.get_rng_state(), random.getstate(), own.get_state()
    drawn = SamplerOrder(sampler, 12, seed=3)
    epochs = [drawn(number) for number in (0, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(own.get_state(), before[2])
    torch.rand(3)
    again = SamplerOrder(sampler, 12, seed=3)
    assert [again(number) for number in (2, 1, 0)] == epochs[::-1]
    assert len({tuple(one) for one in epochs}) == 3
    assert SamplerOrder(sampler, 12, seed=4)(0) != epochs[0]


def test_batches_are_cut_from_the_order_over_epochs_of_any_length() -> None:
    drawn = SamplerOrder(ByEpoch(), 12, seed=0)
    assert [drawn(0), drawn(5), drawn(0)] == [[0, 1, 2], [5, 1, 2], [0, 1, 2]]
    sampler = GlobalBatchSampler(samples=3, target_batch=4, seed=0, epochs=3, order=drawn)
    assert [batch.ids for batch in sampler.batches()] == [[0, 1, 2, 1], [1, 2, 2, 1], [2]]
    assert [batch.ids for batch in sampler.batches(1)] == [[1, 2, 2, 1], [2]]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([], "drew no sample in epoch 1: it must draw indices from 0 to 11"),
        ([3, 12], "drew 12 in epoch 1"),
        ([-1], "drew -1 in epoch 1"),
        (["a"], "drew a str: it must draw indices"),
        (Endless(), "drew over 12,000 samples in epoch 1"),
        (Growing(), "drew 3 samples in epoch 3 and 1 in epoch 1"),
    ],
)
def test_an_invalid_sampler_is_refused(sampler: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplerOrder(sampler, 12, seed=0)(2)
