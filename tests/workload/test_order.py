"""The order of the data, against a plain simulation of epochs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.workload.order import GlobalBatchSampler, permutation


def simulate(samples: int, target: int, epochs: int, last: str, seed: int) -> list[list[int]]:
    """Draw all batches by a loop over epochs and samples."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for epoch in range(epochs):
        for index in permutation(samples, seed=seed, epoch=epoch):
            batch.append(index)
            if len(batch) == target:
                batches.append(batch)
                batch = []
        if last == "flush" and batch:
            batches.append(batch)
        if last != "carry":
            batch = []
    if batch:
        batches.append(batch)
    return batches


@given(
    samples=st.integers(1, 40),
    target=st.integers(1, 60),
    epochs=st.integers(1, 5),
    last=st.sampled_from(["carry", "flush", "drop"]),
    data=st.data(),
)
def test_batches_equal_those_of_the_simulation_from_any_start(samples, target, epochs, last, data) -> None:
    sampler = GlobalBatchSampler(samples=samples, target_batch=target, seed=7, epochs=epochs, last_batch=last)
    expected = simulate(samples, target, epochs, last, seed=7)
    assert sampler.total == len(expected)
    start = data.draw(st.integers(0, sampler.total))
    assert [batch.ids for batch in sampler.batches(start)] == expected[start:]
    assert [batch.index for batch in sampler.batches(start)] == list(range(start, sampler.total))
    for index, ids in enumerate(expected):
        assert sampler.size(index) == len(ids)
        assert sampler.seen(index) == sum(map(len, expected[:index]))


@given(st.integers(1, 50), st.integers(1, 70), st.integers(1, 30))
def test_a_run_counted_in_steps_has_only_full_batches(samples: int, target: int, steps: int) -> None:
    sampler = GlobalBatchSampler(samples=samples, target_batch=target, seed=0, steps=steps)
    batches = list(sampler.batches())
    assert [len(batch.ids) for batch in batches] == [target] * steps
    counts = Counter(index for batch in batches for index in batch.ids)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(samples)) <= 1


def test_epochs_are_new_permutations_and_seeds_differ() -> None:
    orders = {tuple(permutation(100, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    assert all(sorted(order) == list(range(100)) for order in orders)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63, -1])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert sorted(permutation(10, seed=seed, epoch=3)) == list(range(10))
