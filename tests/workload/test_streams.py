"""Streams: read once and forward, over epochs and resumes, in this process or in loader processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from autobatch import InputError
from autobatch.workload.streams import ENDLESS, StreamSampler


class Numbers(IterableDataset[int]):
    """The numbers from 0, and from 100 in the second epoch."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.count))


def sampler_of(stream: Any, steps: int = 4) -> StreamSampler:
    return StreamSampler(samples=ENDLESS, target_batch=4, seed=0, steps=steps, stream=stream)


def drawn(sampler: StreamSampler, start: int = 0) -> list[list[int]]:
    return [[sampler.held[place] for place in batch.ids] for batch in sampler.batches(start)]


def test_samples_are_held_until_the_next_batch_and_nothing_is_drawn_outside() -> None:
    """Each epoch has other numbers."""
    sampler, before = sampler_of(Numbers(), steps=3), torch.get_rng_state()
    assert drawn(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 100, 101]]
    assert torch.equal(torch.get_rng_state(), before)
    assert list(sampler.held) == [8, 9, 10, 11]


def test_workers_read_the_same_samples() -> None:
    whole = drawn(sampler_of(Numbers()))
    first, again = sampler_of(Numbers()), sampler_of(Numbers())
    batches, seen = first.batches(), []
    for sampler in (first, again):
        sampler.workers = {"num_workers": 1, "prefetch_factor": 2}
    for _ in range(3):
        seen.append([first.held[place] for place in next(batches).ids])
    (words,) = again.load_state_dict(first.state_dict())
    assert "the first 2 samples" in words
    assert seen + drawn(again, start=3) == whole


@pytest.mark.parametrize(
    ("stream", "workers", "message"),
    [
        (lambda: iter([]), 0, "has 0 samples"),
        (iter(range(6)), 0, "in epoch 2 .* has 0 samples"),
        (lambda: (torch.ones(4, 3), torch.ones(4)), 0, r"a tuple, .*zip.*\n.*test_streams.py:\d+\)"),
        (lambda: None, 0, r"returned nothing \(None\), which does not yield samples one by one: write a"),
        (lambda: "mnist", 0, "returned a str, which does not yield samples"),
        (lambda: DataLoader(Numbers(), 4), 0, "returned a DataLoader, .*the dataset of a loader"),
        (lambda: iter(range(6)), 2, r"--workers 2\) cannot share .*\n.*test_streams.py:\d+\)"),
        (Numbers(40), 2, "each of 2 loader processes yields the same samples"),
    ],
)
def test_a_stream_that_cannot_be_read_is_refused(stream: Any, workers: int, message: str) -> None:
    sampler = sampler_of(stream, steps=20)
    if workers:
        sampler.workers = {"num_workers": workers}
    with pytest.raises(InputError, match=message):
        drawn(sampler)
