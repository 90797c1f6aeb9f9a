"""The order of the data against a plain simulation of epochs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.workload.order import GlobalBatchSampler, permutation


def simulate(samples: int, target: int, epochs: int, last: str, seed: int) -> list[list[int]]:
    """The definition, written as a loop over epochs and samples."""
    windows: list[list[int]] = []
    open_window: list[int] = []
    for epoch in range(epochs):
        for index in permutation(samples, seed=seed, epoch=epoch):
            open_window.append(index)
            if len(open_window) == target:
                windows.append(open_window)
                open_window = []
        if last == "flush" and open_window:
            windows.append(open_window)
        if last != "carry":
            open_window = []
    if open_window:
        windows.append(open_window)
    return windows


@given(
    samples=st.integers(1, 40),
    target=st.integers(1, 60),
    epochs=st.integers(1, 5),
    last=st.sampled_from(["carry", "flush", "drop"]),
    data=st.data(),
)
def test_windows_are_those_of_the_simulation_from_anywhere(samples, target, epochs, last, data) -> None:
    sampler = GlobalBatchSampler(samples=samples, target_batch=target, seed=7, epochs=epochs, last_batch=last)
    expected = simulate(samples, target, epochs, last, seed=7)
    assert sampler.total == len(expected)
    start = data.draw(st.integers(0, sampler.total))
    assert [window.ids for window in sampler.batches(start)] == expected[start:]
    assert [window.index for window in sampler.batches(start)] == list(range(start, sampler.total))
    for index, ids in enumerate(expected):
        assert sampler.size(index) == len(ids)
        assert sampler.seen(index) == sum(map(len, expected[:index]))


@given(st.integers(1, 50), st.integers(1, 70), st.integers(1, 30))
def test_a_run_counted_in_steps_has_only_full_windows(samples: int, target: int, steps: int) -> None:
    sampler = GlobalBatchSampler(samples=samples, target_batch=target, seed=0, steps=steps)
    windows = list(sampler.batches())
    assert [len(window.ids) for window in windows] == [target] * steps
    counts = Counter(index for window in windows for index in window.ids)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(samples)) <= 1


def test_epochs_are_new_permutations_and_seeds_differ() -> None:
    orders = {tuple(permutation(100, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    assert all(sorted(order) == list(range(100)) for order in orders)


@pytest.mark.parametrize("seed", [0, 2**31, 2**63, -1])
def test_any_seed_will_do(seed: int) -> None:
    assert sorted(permutation(10, seed=seed, epoch=3)) == list(range(10))
