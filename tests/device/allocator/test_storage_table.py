"""The table of live storages: what is counted, taken over and freed."""

from __future__ import annotations

import pytest
import torch

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.storage_table import EMPTY, StorageTable, storages_of
from autobatch.device.allocator.trace import FREE

pytestmark = pytest.mark.usefixtures("no_garbage_collection")


def table(limit: int | None = None, **options) -> StorageTable:
    fields = {"text": str, "storage_device": "cpu", "record": True, "on_new": None}
    return StorageTable(CountingAllocator(limit), **(fields | options))


def test_a_storage_counts_once_and_until_it_dies():
    mine = table()
    x = torch.ones(10)
    for tensor in (x, x[3:], x.detach()):
        mine.count(tensor)
    assert mine.allocator.allocated_bytes == 40
    view = x.view(2, 5)
    del x, tensor
    assert mine.allocator.allocated_bytes == 40
    del view
    assert mine.allocator.allocated_bytes == 0
    assert mine.events == [(0, 40), (0, FREE)]


def test_only_storages_of_the_device_count():
    mine = table(storage_device="meta")
    mine.count(torch.ones(10))
    assert mine.allocator.allocated_bytes == 0
    fake = torch.empty(10, device="meta")
    mine.count(fake)
    assert mine.allocator.allocated_bytes == 40


def test_a_refusal_has_the_text_and_counts_nothing():
    mine = table(39, text=lambda error: f"{error.attempted} of {error.limit}")
    x = torch.ones(10)
    with pytest.raises(torch.OutOfMemoryError, match="40 of 39") as caught:
        mine.count(x)
    assert caught.value.__context__ is None
    assert (mine.allocator.allocated_bytes, mine.events) == (0, [])
    assert mine.watch_of(x) is None


def test_a_resize_takes_the_new_block_before_it_frees_the_old():
    mine = table()
    x, other = torch.ones(10), torch.ones(5)
    mine.count(x)
    x.untyped_storage().resize_(100)
    mine.check(x)
    mine.check(other)  # not counted before: left out
    assert mine.events == [(0, 40), (1, 100), (0, FREE)]
    assert mine.allocator.peak_allocated_bytes == 140
    x.untyped_storage().resize_(8)
    mine.check_all()
    assert mine.allocator.allocated_bytes == 8


def test_an_empty_storage_has_no_number():
    numbers = []
    mine = table(on_new=numbers.append)
    x = torch.empty(0)
    mine.count(x)
    assert mine.watch_of(x).block == EMPTY
    with mine.held(0) as empty, mine.held(64) as block, mine.held(0, is_numbered=True) as other:
        assert (empty, block, other) == (EMPTY, 0, 1)
    assert (numbers, mine.events) == ([0, 1], [(0, 64), (1, 0), (1, FREE), (0, FREE)])
    assert mine.allocator.peak_allocated_bytes == 64


def test_a_sum_takes_over_the_block_of_a_summand_that_dies():
    mine = table()
    x = torch.ones(10)
    mine.count(x)
    y = x + 1
    assert mine.defer(x, y)
    del x
    mine.settle()
    assert mine.events == [(0, 40)]
    assert mine.watch_of(y).block == 0
    del y
    assert mine.allocator.allocated_bytes == 0


def test_a_sum_whose_summand_lives_is_counted():
    mine = table()
    x = torch.ones(10)
    mine.count(x)
    y = x + 1
    assert mine.defer(x, y)
    mine.settle()
    assert mine.allocator.allocated_bytes == 80
    assert not mine.defer(torch.ones(10), y), "a summand that is not counted has no block"
    assert not mine.defer(x, torch.ones(11)), "nor does a block of another size serve"


def test_forgotten_storages_stay_counted():
    mine = table()
    x = torch.ones(10)
    mine.count(x)
    mine.forget()
    del x
    assert mine.allocator.allocated_bytes == 40


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")  # beta, says torch
@pytest.mark.parametrize(
    ("layout", "parts"), [("to_sparse", 2), ("to_sparse_csr", 3), ("to_sparse_csc", 3), ("clone", 1)]
)
def test_a_sparse_tensor_consists_of_its_parts(layout, parts):
    dense = torch.eye(4)
    found = list(storages_of(getattr(dense, layout)()))
    assert len(found) == parts
    floats = 16 if layout == "clone" else 4
    assert floats * 4 in [storage.nbytes() for storage in found]
