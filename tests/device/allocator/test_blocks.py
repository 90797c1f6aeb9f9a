"""Blocks that are split and merged, and the order in which a pool gives them out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.device.allocator.blocks import Block, Pool


def pool() -> Pool:
    return Pool(page_bytes=20, keeps_tail_bytes=0)


def chain(block: Block) -> list[tuple[int, int]]:
    """Return address and size of a block and all after it."""
    found, each = [], block
    while each is not None:
        assert each.next is None or each.next.previous is each
        found.append((each.address, each.size))
        each = each.next
    return found


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_splits_cover_the_block_in_order(sizes):
    whole = Block(pool(), 100, sum(sizes))
    rest = whole
    for size in sizes[:-1]:
        rest = rest.split(size)
    starts = [100 + sum(sizes[:index]) for index in range(len(sizes))]
    assert chain(whole) == list(zip(starts, sizes, strict=True))


@pytest.mark.parametrize(
    ("held", "mapped", "merged"),
    [
        ((False, False), (True, True), [(0, 30)]),
        ((True, False), (True, True), [(0, 10), (10, 20)]),
        ((False, True), (True, True), [(0, 20), (20, 10)]),
        ((False, False), (False, True), [(0, 10), (10, 20)]),
    ],
)
def test_a_block_merges_with_free_neighbours_in_its_state(held, mapped, merged):
    mine = pool()
    first = Block(mine, 0, 30)
    middle = first.split(10)
    last = middle.split(10)
    first.held, last.held = held
    first.mapped, last.mapped = mapped
    for block in (first, last):
        if not block.held:
            mine.insert(block)
    middle.merge_neighbours()
    start = middle
    while start.previous is not None:
        start = start.previous
    assert chain(start) == merged
    assert all(block is not middle for _, _, block in mine.free)


def test_the_best_fit_is_the_smallest_then_the_lowest():
    mine = pool()
    blocks = {(address, size): Block(mine, address, size) for address, size in ((0, 8), (50, 5), (20, 5))}
    for block in blocks.values():
        mine.insert(block)
    assert mine.take_best_fit(9) is None
    taken = [mine.take_best_fit(4) for _ in range(3)]
    assert [(block.address, block.size) for block in taken] == [(20, 5), (50, 5), (0, 8)]
    assert mine.free == []


def test_a_block_that_can_grow_is_spared_for_one_that_cannot():
    mine = pool()
    growing = Block(mine, 0, 40)
    unmapped = growing.split(5)
    unmapped.mapped = False
    fixed = Block(mine, 100, 6)
    for block in (growing, unmapped, fixed):
        mine.insert(block)
    assert mine.take_best_fit(5) is fixed
    assert mine.take_best_fit(5) is growing


def test_room_is_the_lowest_run_of_free_and_unmapped_blocks():
    mine = pool()
    held = Block(mine, 0, 60)
    free = held.split(10)
    unmapped = free.split(5)
    held.held, unmapped.mapped = True, False
    mine.insert(free)
    mine.insert(unmapped)
    assert mine.lowest_with_room(50) is free
    assert mine.lowest_with_room(51) is None
    free.held = True
    mine.remove(free)
    assert mine.lowest_with_room(45) is unmapped
    assert mine.lowest_with_room(46) is None


def test_removed_blocks_are_in_no_list():
    mine = pool()
    blocks = [Block(mine, address, 5, mapped=address < 20) for address in (0, 10, 20, 30)]
    for block in blocks:
        mine.insert(block)
    for block in blocks[::2]:
        mine.remove(block)
    assert [block for _, _, block in mine.free] == [blocks[1]]
    assert [block for _, block in mine.unmapped] == [blocks[3]]
