"""The caching allocator against worked examples, and against recordings of real GPUs, address by address."""

from __future__ import annotations

import pytest

from autobatch.core.units import MiB
from autobatch.device.allocator import BudgetExceeded, CachingAllocator
from benchmarks.published.recordings import read, replays_of
from tests.support.torch_snapshots import RECORDINGS


@pytest.mark.parametrize(("size", "held"), [(19 * MiB, 20 * MiB), (19 * MiB - 512, 19 * MiB - 512)])
def test_a_tail_of_one_mib_stays_with_its_block(size, held):
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (held, 20 * MiB)


def test_expandable_segments_map_whole_pages_and_unmap_them():
    allocator = CachingAllocator(100 * MiB, expandable=True)
    first = allocator.malloc(11 * MiB)  # one 20 MiB page, split
    second = allocator.malloc(30 * MiB)  # 9 MiB are left, 21 more: two pages
    assert (first.size, second.size, allocator.reserved_bytes) == (11 * MiB, 30 * MiB, 60 * MiB)
    assert second.address == first.address + 11 * MiB
    allocator.free(second)
    allocator.release()  # pages 2 and 3 have no live byte, page 1 does
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (11 * MiB, 20 * MiB)
    tiny = allocator.malloc(1)  # the small pool has pages of 2 MiB
    assert (tiny.size, allocator.reserved_bytes) == (512, 22 * MiB)
    with pytest.raises(BudgetExceeded):
        allocator.malloc(75 * MiB)  # four pages beside what is left of the first; three may be mapped


def test_memory_that_is_held_already_stays_and_counts_and_a_full_cache_is_an_error():
    allocator = CachingAllocator(40 * MiB, held_bytes=20 * MiB)
    allocator.release()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MiB, 20 * MiB)
    allocator.free(allocator.malloc(20 * MiB))
    with pytest.raises(BudgetExceeded):
        allocator.malloc(22 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
    over = CachingAllocator(20 * MiB, held_bytes=30 * MiB)
    with pytest.raises(BudgetExceeded):
        over.malloc(1)


@pytest.mark.parametrize("path", sorted(RECORDINGS.rglob("*.csv.gz")), ids=lambda path: path.name[:-7])
def test_each_block_lies_where_the_gpu_put_it(path):
    (found,) = replays_of([read(path)])
    assert found.allocations > 30
    assert found.agrees
