"""Streams: their first samples, their length, and reading them once, forward, over epochs and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import autobatch
from autobatch import BatchFunction, InputError
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.shared_stream import open_stream
from autobatch.workload.streams import ENDLESS, StreamSampler
from tests.support.training import make_workload


class Numbers(IterableDataset[int]):
    """The numbers from 0, and from 100 in the second epoch."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.epoch = 0
        self.reads = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.reads += 1
            yield 100 * self.epoch + number


def generate() -> Iterator[int]:
    yield from range(10)


def sampler_of(stream: Any, steps: int = 4) -> StreamSampler:
    reader = open_stream(stream, Ranks(), 0, 4)
    return StreamSampler(samples=ENDLESS, target_batch=4, seed=0, steps=steps, reader=reader)


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
        sampler.reader.read_with(num_workers=1, prefetch_factor=2)
    for _ in range(2):
        seen.append([first.held[place] for place in next(batches).ids])
    (words,) = again.load_state_dict(first.state_dict())
    assert "its first 8 samples were read again and skipped" in words
    assert seen + drawn(again, start=2) == whole


def one_size(size: int, step: int) -> Any:
    return torch.zeros(3), [1, 2, 3]


def by_size(size: int, step: int) -> Any:
    return torch.zeros(size, 5, dtype=torch.float64), torch.zeros(size, dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchFunction(3), "takes a function, found an int"),  # type: ignore[arg-type]
        (
            lambda: BatchFunction(lambda split: split),  # type: ignore[arg-type, misc]
            r"called with \(size, step\), .*test_streams.py:\d+\) .* too many positional arguments",
        ),
        (
            lambda: make_workload(train_data=one_size),
            r"BatchFunction .* called with \(\), .*test_streams.py:\d+\)",
        ),
        (
            lambda: autobatch.fit(make_workload(train_data=BatchFunction(by_size)), target_batch=4, epochs=1),
            "has no end, .* give the number of optimizer steps",
        ),
        (lambda: drawn_once(one_size), r"test_streams.py:\d+\) was asked for 4 samples and returned 3"),
        (
            lambda: drawn_once(lambda size, step: (torch.ones(4), 5)),
            r"batch\[1\] is an int, which has no sample",
        ),
        (lambda: drawn_once(lambda size, step: {"x": torch.tensor(1)}), r"batch\['x'\] is a 0-d tensor"),
        (
            lambda: drawn_once(lambda size, step: [torch.ones(4), np.ones(5)]),
            r"test_streams.py:\d+\) cannot .* batch\[0\] has 4, batch\[1\] has 5. Let each part",
        ),
    ],
)
def test_batches_that_are_no_samples_are_refused_with_the_users_line(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_generator_function_is_not_read_by_workers() -> None:
    sampler = sampler_of(generate)
    sampler.reader.read_with(num_workers=2)
    with pytest.raises(InputError, match=r"--workers 2\) cannot share .*test_streams.py:\d+\): use"):
        drawn(sampler)


def drawn_once(function: Any) -> None:
    drawn(sampler_of(BatchFunction(function)))


def test_a_stream_that_can_be_read_once_only_is_refused() -> None:
    with pytest.raises(InputError, match="the stream gave no sample in epoch"):
        drawn(sampler_of(iter(range(6))))
