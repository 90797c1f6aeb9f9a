"""Cuts over several ranks: against brute force, shared evenly, and with equal counts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.core.records.plan import MicroBatchCost
from autobatch.workload.joint_cut import joint_cut
from autobatch.workload.size_split import cheapest_cut

COMPUTE = MicroBatchCost(fixed=0.012, per_sample=0.0, per_size=0.431e-3, per_size_squared=0.421e-6)
"""Cost on a CPU, where arithmetic binds: a transformer of 7.5 million parameters."""


def drawn(name: str, count: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    found = {
        "uniform": lambda: draw.uniform(1, 513, count),
        "log-normal": lambda: 512 * np.exp(draw.normal(-1.8, 0.8, count)),
        "sft": lambda: np.where(
            draw.random(count) < 0.9,
            512 * np.exp(draw.normal(-2.2, 0.6, count)),
            draw.uniform(256, 513, count),
        ),
        "two-peaked": lambda: np.where(
            draw.random(count) < 0.6, draw.normal(102, 25, count), draw.normal(410, 25, count)
        ),
    }[name]()
    return -np.sort(-found.astype(int).clip(2, 512).astype(float))


def imbalance(seconds: list[float]) -> float:
    return max(seconds) * len(seconds) / sum(seconds) - 1


def rank_seconds(sizes: np.ndarray, cost: MicroBatchCost, cut: list[list[list[int]]]) -> list[float]:
    """Return the cost of each rank, from the definition of a cost."""

    def seconds(m: int, size: float) -> float:
        return cost.fixed + m * (cost.per_sample + cost.per_size * size + cost.per_size_squared * size**2)

    return [sum(seconds(len(group), sizes[group[0]]) for group in groups if group) for groups in cut]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 5), st.integers(20, 200))
def test_each_sample_is_on_one_rank_within_its_limit(sizes: list[int], ranks: int, room: int) -> None:
    ordered = np.array(sorted(sizes, reverse=True), dtype=float)
    limits = [max(1, room // int(size)) for size in ordered]
    cut = joint_cut(ordered, limits, COMPUTE, ranks)
    assert len(cut) == ranks
    assert sorted(place for groups in cut for group in groups for place in group) == [*range(len(sizes))]
    assert all(group == sorted(group) for groups in cut for group in groups)
    assert all(len(group) <= limits[group[0]] for groups in cut for group in groups if group)
    assert len({len(groups) for groups in cut}) == 1
    assert all(group for groups in cut for group in groups[:-1])


@pytest.mark.parametrize("name", ["uniform", "log-normal", "sft", "two-peaked"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_share_the_cost_to_one_percent(name: str, ranks: int) -> None:
    for seed in range(4):
        sizes = drawn(name, 512, seed)
        limits = (8 * 512 // sizes).astype(int)
        cut = joint_cut(sizes, limits, COMPUTE, ranks)
        assert imbalance(rank_seconds(sizes, COMPUTE, cut)) <= 0.01


def test_one_rank_gets_the_cheapest_cut() -> None:
    sizes = drawn("sft", 96, 0)
    limits = (8 * 512 // sizes).astype(int)
    (groups,) = joint_cut(sizes, limits, COMPUTE, 1)
    assert [len(group) for group in groups] == cheapest_cut(sizes, limits, COMPUTE)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_groups_cost_as_little_as_those_of_any_cut(seed: int, ranks: int) -> None:
    """Brute force over all contiguous cuts with a sample for every rank; the fullest rank sets the cost."""
    draw = random.Random(seed)
    sizes = np.array(sorted((draw.randint(5, 60) for _ in range(11)), reverse=True), dtype=float)
    cost = MicroBatchCost(fixed=draw.choice([0.0, 0.5, 5.0]), per_size=0.05, per_size_squared=0.002)
    limits = [max(2, 200 // int(size)) for size in sizes]

    def seconds(group: range) -> float:
        fullest = list(group[::ranks])
        return rank_seconds(sizes, cost, [[fullest]])[0]

    best = min(
        sum(map(seconds, groups))
        for number in range(1, len(sizes) // ranks + 1)
        for inner in itertools.combinations(range(1, len(sizes)), number - 1)
        for groups in [[range(a, b) for a, b in itertools.pairwise([0, *inner, len(sizes)])]]
        if all(ranks <= len(group) <= ranks * limits[group[0]] for group in groups)
    )
    cut = joint_cut(sizes, limits, cost, ranks)
    together = [sorted(place for hand in hands for place in hand) for hands in zip(*cut, strict=True)]
    assert sum(seconds(range(group[0], group[-1] + 1)) for group in together) == pytest.approx(best)
    assert max(rank_seconds(sizes, cost, cut)) <= best + 1e-9
