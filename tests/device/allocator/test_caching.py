"""The caching allocator against worked examples, invariants, and an independent slow model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import BudgetExceeded

# Requests of a step: many small tensors, some of medium size, a few with a segment of their own.
SIZES = st.one_of(
    st.integers(0, 4 * KiB),
    st.integers(0, 2 * MiB),
    st.integers(MiB, 12 * MiB),
    st.integers(9 * MiB, 40 * MiB),
    st.sampled_from([512, 513, MiB, MiB + 1, 10 * MiB - 512, 10 * MiB, 20 * MiB]),
)
# An allocation (a size), or the free of the n-th live block; -1 releases the cache.
STEPS = st.lists(st.one_of(SIZES, st.tuples(st.integers(0, 40)), st.just((-1,))), max_size=60)
LIMITS = st.sampled_from([None, 4 * MiB, 64 * MiB, 67 * MiB + 5, 200 * MiB])


class SlowModel:
    """The rules of CUDA's caching allocator, with lists and linear search only."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.segments: list[dict] = []  # in the order of their addresses

    def reserved(self) -> int:
        return sum(s["size"] for s in self.segments)

    def allocated(self) -> int:
        return sum(size for s in self.segments for _, size, held in s["blocks"] if held)

    def malloc(self, size: int) -> tuple[dict, int] | None:
        want = (size + 511) // 512 * 512
        small = want <= 2**20
        found = [
            (block[1], index, position)
            for index, segment in enumerate(self.segments)
            if segment["small"] == small
            for position, block in enumerate(segment["blocks"])
            if not block[2] and block[1] >= want
        ]
        if found:
            _, index, position = min(found)
            return self._carve(self.segments[index], position, want)
        new = 2 * 2**20 if small else 20 * 2**20 if want < 10 * 2**20 else -(-want // 2**21) * 2**21
        if self.limit is not None and self.reserved() + new > self.limit:
            return None
        self.segments.append({"small": small, "size": new, "blocks": [[0, new, False]]})
        return self._carve(self.segments[-1], 0, want)

    def _carve(self, segment: dict, position: int, want: int) -> tuple[dict, int]:
        start, size, _ = segment["blocks"][position]
        rest = size - want
        if rest >= 512 if segment["small"] else rest > 2**20:
            segment["blocks"][position : position + 1] = [[start, want, True], [start + want, rest, False]]
        else:
            segment["blocks"][position][2] = True
        return segment, start

    def free(self, where: tuple[dict, int]) -> None:
        segment, start = where
        merged: list[list] = []
        for block in segment["blocks"]:
            if block[0] == start:
                block[2] = False
            if merged and not merged[-1][2] and not block[2]:
                merged[-1][1] += block[1]
            else:
                merged.append(list(block))
        segment["blocks"] = merged

    def release(self) -> None:
        self.segments = [s for s in self.segments if len(s["blocks"]) > 1 or s["blocks"][0][2]]


@settings(max_examples=80)
@given(STEPS, LIMITS)
def test_agrees_with_the_slow_model_event_by_event(steps, limit):
    fast, slow = CachingAllocator(limit), SlowModel(limit)
    live = []
    for step in steps:
        if step == (-1,):
            fast.release()
            slow.release()
        elif isinstance(step, tuple):
            if live:
                a, b = live.pop(step[0] % len(live))
                fast.free(a)
                slow.free(b)
        elif step > 0:
            expected = slow.malloc(step)
            if expected is None:
                with pytest.raises(BudgetExceeded):
                    fast.malloc(step)
            else:
                live.append((fast.malloc(step), expected))
        assert (fast.allocated_bytes, fast.reserved_bytes) == (slow.allocated(), slow.reserved())


def test_expandable_segments_map_whole_pages_and_unmap_them():
    allocator = CachingAllocator(100 * MiB, AllocatorConfig(expandable_segments=True))
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
    allocator = CachingAllocator(40 * MiB, AllocatorConfig(held_bytes=20 * MiB))
    allocator.release()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MiB, 20 * MiB)
    allocator.free(allocator.malloc(20 * MiB))
    with pytest.raises(BudgetExceeded):
        allocator.malloc(22 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
    over = CachingAllocator(20 * MiB, AllocatorConfig(held_bytes=30 * MiB))
    with pytest.raises(BudgetExceeded):
        over.malloc(1)
