"""The free lists of CUDA's caching allocator: blocks, pools, and the constants that rule them.

A `Block` is a range of addresses; the blocks of one segment are linked in address order. A `Pool` keeps the
free blocks of one kind sorted by (size, address), which is the order that the best fit is looked up in
(c10/cuda/CUDACachingAllocator.cpp, ``BlockComparatorSize``). Used by `autobatch.footprint.allocator` only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from autobatch.units import MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """What can be set of the caching allocator; the defaults are torch's own.

    Sources are the constants of c10/core/AllocatorConfig.h (torch 2.13) unless said otherwise. Off by default
    and not modelled: ``max_split_size_mb``, ``roundup_power2_divisions``, ``garbage_collection_threshold``.
    """

    expandable_segments: bool = False
    """One growing segment for each pool in place of many fixed ones (``expandable_segments:True``)."""
    small_segment_bytes: int = 2 * MiB
    """Segment that small requests are packed in, and the page of an expandable one: ``kSmallBuffer``."""
    large_segment_bytes: int = 20 * MiB
    """The same for requests over 1 MiB and under 10 MiB: ``large_segment_size()``, once ``kLargeBuffer``."""

    round_bytes: int = 512
    """Every size is a multiple of this: ``kMinBlockSize``."""
    small_bytes: int = 1 * MiB
    """The largest request of the small pool, and the tail that a large block keeps: ``kSmallSize``."""
    own_segment_bytes: int = 10 * MiB
    """From here on a request gets a segment of its own size: ``kMinLargeAlloc``."""
    segment_round_bytes: int = 2 * MiB
    """Such a segment is a multiple of this: ``kRoundLarge``."""

    def rounded(self, size: int) -> int:
        """The bytes that a block for a request of ``size`` bytes takes (``round_size``)."""
        return max(1, -(-size // self.round_bytes)) * self.round_bytes

    def segment_bytes(self, rounded: int) -> int:
        """The bytes asked of the driver where no free block serves (``get_allocation_size``)."""
        if rounded <= self.small_bytes:
            return self.small_segment_bytes
        if rounded < self.own_segment_bytes:
            return self.large_segment_bytes
        return -(-rounded // self.segment_round_bytes) * self.segment_round_bytes


class Block:
    """A range of addresses in a segment: held by the user, free, or (expandable segments) not mapped."""

    __slots__ = ("address", "held", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.held = False
        self.mapped = mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    def split(self, size: int) -> Block:
        """Cut the block after ``size`` bytes: it keeps the front, the rest is returned, linked behind it."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def merge_neighbours(self) -> None:
        """Take in the neighbours in the same state (``try_merge_blocks``); the block itself is in no list."""
        before = self.previous
        if before is not None and not before.held and before.mapped == self.mapped:
            before.pool.remove(before)
            self.address, self.size = before.address, before.size + self.size
            self.previous = before.previous
            if self.previous is not None:
                self.previous.next = self
        after = self.next
        if after is not None and not after.held and after.mapped == self.mapped:
            after.pool.remove(after)
            self.size += after.size
            self.next = after.next
            if self.next is not None:
                self.next.previous = self


class Pool:
    """The free blocks of one kind (small or large), and the unmapped ones of its expandable segments."""

    __slots__ = ("free", "keeps_tail_bytes", "page_bytes", "unmapped")

    def __init__(self, *, page_bytes: int, keeps_tail_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.keeps_tail_bytes = keeps_tail_bytes
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        """List a block that is not held: with the free ones if it is mapped."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a listed block out of its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def take_best_fit(self, size: int) -> Block | None:
        """Take out the smallest free block of at least ``size`` bytes, lowest first (``get_free_block``).

        A block that can grow into unmapped space counts as large as it could become, so a block that cannot
        is preferred to it even if it is somewhat larger.
        """
        at = bisect_left(self.free, (size,))
        if at == len(self.free):
            return None
        while (
            self.unmapped
            and at + 1 < len(self.free)
            and _reach(self.free[at + 1][2]) < _reach(self.free[at][2])
        ):
            at += 1
        return self.free.pop(at)[2]


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
