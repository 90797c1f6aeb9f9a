"""Streams: their first samples, their length, and reading them once, forward, over epochs and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import autobatch
from autobatch import BatchFunction, InputError, Unbatched
from autobatch.workload.streams import ENDLESS, StreamSampler, StreamView
from tests.support.libraries import installed
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


class Stateful(Numbers):
    """Numbers that know their own place, as data sets with a ``state_dict`` do."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        first, self.place = self.place, self.place
        for number in range(first, self.count):
            self.reads += 1
            self.place = number + 1
            yield 100 * self.epoch + number
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def generate() -> Iterator[int]:
    yield from range(10)


def sampler_of(view: StreamView, steps: int = 6) -> StreamSampler:
    return StreamSampler(samples=ENDLESS, target_batch=4, seed=0, steps=steps, view=view)


def drawn(sampler: StreamSampler, start: int = 0) -> list[list[int]]:
    return [[sampler.view[one] for one in batch.ids] for batch in sampler.batches(start)]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (Numbers, "the stream has no state_dict, so its first 2 samples were read again and skipped"),
        (Stateful, "the stream continues from its own state"),
    ],
)
def test_a_resumed_view_continues_where_it_was(stream: Any, words: str) -> None:
    """Each epoch has other numbers; a batch can be read again until the next one begins."""
    whole = drawn(sampler_of(StreamView(stream())))
    assert whole[1:3] == [[4, 5, 6, 7], [8, 9, 100, 101]]
    view = StreamView(stream())
    sampler = sampler_of(view)
    batches = sampler.batches()
    seen = [[[view[one] for one in ids] for _ in "12"][1] for ids in (next(batches).ids for _ in range(3))]
    with pytest.raises(KeyError):
        _ = view[7]
    state = view.state_dict()
    assert (state["position"], state["epoch"], state["in_epoch"]) == (12, 1, 2)
    source = stream()
    again = sampler_of(StreamView(source))
    before = torch.get_rng_state()
    assert again.view.load_state_dict(state) == words
    assert torch.equal(torch.get_rng_state(), before)
    assert seen + drawn(again, start=3) == whole
    assert source.reads == 12 + (0 if stream is Stateful else 2)


def test_a_shuffle_buffer_that_a_state_leaves_out_is_told() -> None:
    """The oracle is the order itself: it never changes without a word."""
    library = installed("datasets")
    data = library.Dataset.from_dict({"x": list(range(200))})

    def plain() -> Any:
        return data.to_iterable_dataset(num_shards=2)

    def shuffled() -> Any:
        return plain().shuffle(seed=1, buffer_size=50)

    def both() -> Any:
        return library.interleave_datasets([plain(), shuffled().map(lambda row: row)])

    for stream, is_told in ((plain, False), (shuffled, True), (both, True)):
        # Each has a stream of its own: the threads of interleaved ones would share its state.
        whole, first, again = (StreamView(stream()) for _ in range(3))
        expected = [whole[place]["x"] for place in range(200)]
        assert [first[place]["x"] for place in range(110)] == expected[:110]
        assert ("its shuffle buffer" in again.load_state_dict(first.state_dict())) is is_told
        assert ([again[place]["x"] for place in range(110, 200)] != expected[110:]) is is_told


def test_workers_read_the_same_samples_and_know_their_place() -> None:
    installed("torchdata")
    whole = drawn(sampler_of(StreamView(Numbers()), steps=4))
    view = StreamView(Numbers())
    view.read_with(num_workers=1, prefetch_factor=2)
    batches = sampler_of(view, steps=4).batches()
    seen = [[view[one] for one in next(batches).ids] for _ in range(2)]
    state = view.state_dict()
    again = StreamView(Numbers())
    again.read_with(num_workers=1, prefetch_factor=2)
    assert again.load_state_dict(state) == "the stream continues from its own state"
    assert seen + drawn(sampler_of(again, steps=4), start=2) == whole


class Threes(Stateful):
    """The same numbers in batches of three and less."""

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        numbers = list(super().__iter__())
        for first in range(0, len(numbers), 3):
            yield {
                "x": torch.tensor(numbers[first : first + 3]),
                "name": [*map(str, numbers[first : first + 3])],
            }


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "stream",
    [
        Threes(),
        lambda: [torch.arange(7), torch.arange(7, 10)],
        DataLoader(Threes(), batch_size=None),
        DataLoader(torch.arange(10), sampler=[[0, 1, 2], range(3, 10)], batch_size=None),
    ],
    ids=["iterable", "function", "loader", "sampler"],
)
def test_samples_of_ready_batches_are_those_of_the_stream(stream: Any, workers: int) -> None:
    view = StreamView(Unbatched(stream))
    if workers:
        view.read_with(num_workers=workers, prefetch_factor=2)
    found = [one["x"] if isinstance(one, dict) else one for one in view.__getitems__(range(10))]
    assert [int(one) for one in found] == list(range(10))
    assert not isinstance(view[3], dict) or view[3]["name"] == "3"


def one_size(size: int, step: int) -> Any:
    return torch.zeros(3), [1, 2, 3]


def by_size(size: int, step: int) -> Any:
    return torch.zeros(size, 5, dtype=torch.float64), torch.zeros(size, dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Unbatched([1]), "takes a stream of batches, found a list: give a function"),
        (
            lambda: Unbatched(DataLoader(torch.arange(4))),
            "makes batches itself: give it to Workload.from_loader",
        ),
        (lambda: BatchFunction(3), "takes a function, found an int"),  # type: ignore[arg-type]
        (
            lambda: BatchFunction(lambda split: split),  # type: ignore[arg-type, misc]
            r"called with \(size, step\), .*test_streams.py:\d+\) .* too many positional arguments",
        ),
        (
            lambda: make_workload(train_data=one_size),
            r"needs size, step .*test_streams.py:\d+\).*BatchFunction",
        ),
        (
            lambda: autobatch.fit(make_workload(train_data=BatchFunction(by_size)), target_batch=4, epochs=1),
            "has no end, .* give the number of optimizer steps",
        ),
        (lambda: view_of(one_size), r"test_streams.py:\d+\) was asked for 4 samples and returned 3"),
        (
            lambda: view_of(lambda size, step: (torch.ones(4), 5)),
            r"batch\[1\] is an int, which has no sample",
        ),
        (lambda: view_of(lambda size, step: {"x": torch.tensor(1)}), r"batch\['x'\] is a 0-d tensor"),
        (
            lambda: view_of(lambda size, step: [torch.ones(4), np.ones(5)]),
            r"test_streams.py:\d+\) cannot .* batch\[0\] has 4, batch\[1\] has 5. Let each part",
        ),
    ],
)
def test_batches_that_are_no_samples_are_refused_with_the_users_line(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_generator_function_is_not_read_by_workers() -> None:
    view = StreamView(generate)
    view.read_with(num_workers=2)
    with pytest.raises(InputError, match=r"--workers 2\) cannot share .*test_streams.py:\d+\): use"):
        view[0]


def view_of(function: Any) -> Any:
    return StreamView(BatchFunction(function), target_batch=4)[0]


def test_a_stream_that_can_be_read_once_only_is_refused() -> None:
    view = StreamView(iter(range(6)))
    with pytest.raises(InputError, match="the stream gave no sample in epoch"):
        drawn(sampler_of(view))
