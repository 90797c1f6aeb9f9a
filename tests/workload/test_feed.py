"""Micro-batches collated in this process, with a seed for every sample."""

from __future__ import annotations

import random

import numpy as np
import torch

from autobatch.workload.feed import COLLATING, SeededCollate, SeededFeed
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import capture_random_state, seed_generators
from autobatch.workload.split import MicroBatchIds, Split
from tests.support.feeds import Numbered
from tests.support.kinds import Augmented
from tests.support.training import points

BATCH = GlobalBatch(index=2, epoch=0, ids=[5, 3, 8, 0, 7])


def data() -> Numbered:
    return Numbered(*points(dtype=torch.float32).columns)


def feed(seed: int = 1, collate=None) -> SeededFeed:
    return SeededFeed(SeededCollate(data=data(), collate=collate, seed=seed))


def test_draws_are_those_of_the_seed_written_out_by_hand() -> None:
    first, second = feed().collated(BATCH, 3)
    expected = []
    for place, sample in enumerate(BATCH.ids):
        seed_generators(1, 2, place, sample)
        row = points(dtype=torch.float32).columns[0][sample]
        expected.append(row * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.randn(5))
    assert torch.equal(torch.cat([first[1], second[1]]), torch.stack(expected))
    assert torch.cat([first[0], second[0]]).tolist() == BATCH.ids


def test_a_collate_function_is_seeded_by_the_first_sample_of_its_micro_batch() -> None:
    def collate(samples):
        return random.random()

    for part, found in zip(Split().parts(BATCH, 2), feed(collate=collate).collated(BATCH, 2), strict=True):
        seed_generators(1, 2, part.places[0], COLLATING)
        assert found == random.random()


def test_the_generators_of_the_run_are_not_touched() -> None:
    before = capture_random_state()
    for _ in feed().collated(BATCH, 2):
        now = capture_random_state()
        assert now.python == before.python
        assert np.array_equal(now.numpy[1], before.numpy[1])
        assert torch.equal(now.torch, before.torch)


def test_data_that_can_fetch_many_samples_is_asked_for_one_at_a_time() -> None:
    asked = []

    class Many(Augmented):
        def __getitems__(self, indices: list[int]):
            asked.append(indices)
            return [self[index] for index in indices]

    many = Many(*points(dtype=torch.float32).columns)
    SeededCollate(data=many, collate=None, seed=0)(MicroBatchIds(0, range(3), [4, 2, 9]))
    assert asked == [[4], [2], [9]]


def test_fetching_stops_when_it_is_asked_to() -> None:
    answers = iter([False, False, True])
    fetched = []

    class Watched(Numbered):
        def __getitem__(self, index: int):
            fetched.append(index)
            return super().__getitem__(index)

    collate = SeededCollate(data=Watched(*points().columns), collate=None, seed=0)
    assert collate(MicroBatchIds(0, range(4), [4, 2, 9, 1]), is_asked=lambda: next(answers)) is None
    assert fetched == [4, 2]
