"""Loaders of another batch size, against the batches that they yield."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from autobatch.core.errors import InputError
from autobatch.integrations.resized_loader import check_resizable, drops_last, resized
from tests.support.libraries import installed

ROWS = list(range(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


def test_a_loader_keeps_its_data_its_order_and_its_end() -> None:
    loader = DataLoader(ROWS, batch_size=2, sampler=[9, 7, 5, 3, 1], drop_last=True, collate_fn=list)  # type: ignore[arg-type]
    check_resizable(loader, before="prepare")
    assert list(resized(loader, 3)) == [[9, 7, 5]]
    assert list(loader) == [[9, 7], [5, 3]]


def test_a_random_sampler_and_its_generator_are_taken_along() -> None:
    def weighted() -> DataLoader[int]:
        draw = torch.Generator().manual_seed(1)
        sampler = WeightedRandomSampler(torch.ones(10).tolist(), 6, generator=draw)
        return DataLoader(ROWS, batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    flat = torch.cat(list(weighted()))
    assert torch.equal(torch.cat(list(resized(weighted(), 4))), flat)


def test_a_plain_batch_sampler_keeps_its_order_and_its_end() -> None:
    loader = DataLoader(ROWS, batch_sampler=BatchSampler([8, 6, 4, 2, 0], 2, drop_last=True), collate_fn=list)  # type: ignore[arg-type]
    check_resizable(loader, before="prepare")
    assert list(resized(loader, 3)) == [[8, 6, 4]]


def test_a_batch_sampler_tells_whether_a_short_batch_is_left_out() -> None:
    for drop_last in (True, False):
        sampler = BatchSampler(range(10), 4, drop_last)
        assert drops_last(DataLoader(ROWS, batch_sampler=sampler)) is drop_last  # type: ignore[arg-type]
        assert drops_last(DataLoader(ROWS, batch_size=4, drop_last=drop_last)) is drop_last  # type: ignore[arg-type]
    assert not drops_last(DataLoader(Stream(), batch_size=None))


def test_a_stream_keeps_its_own_order() -> None:
    loader = DataLoader(Stream(), batch_size=2, collate_fn=list)
    check_resizable(loader, before="prepare")
    assert list(resized(loader, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.filterwarnings("default")  # torchdata calls what torch is about to drop
def test_a_stateful_loader_stays_one() -> None:
    installed("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(ROWS, batch_size=2, collate_fn=list)
    check_resizable(loader, before="prepare")
    made = resized(loader, 5)
    assert isinstance(made, StatefulDataLoader)
    assert list(made) == [ROWS[:5], ROWS[5:]]


def test_what_has_no_batch_size_is_refused_with_the_way_out() -> None:
    class Own(BatchSampler):
        pass

    refused = {
        "must be a torch DataLoader before prepare, found a list: plan first": ROWS,
        "has an Own that makes its batches": DataLoader(ROWS, batch_sampler=Own(range(10), 2, False)),  # type: ignore[arg-type]
        "has batch_size=None, so its data make the batches": DataLoader(Stream(), batch_size=None),
    }
    for message, loader in refused.items():
        with pytest.raises(InputError, match=message):
            check_resizable(loader, before="prepare")
