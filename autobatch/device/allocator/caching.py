"""CUDA's caching allocator, modelled.

`CachingAllocator` follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13 through rounding, pools, segments,
best fit, splitting, merging, the per-process cap, and the release of cached segments before an error;
`CountingAllocator` is its plain counterpart. Nothing here knows torch, so a trace replays in milliseconds.

Not modelled: several streams, private pools (CUDA graphs), ``max_split_size_mb`` and the other options that
are off by default. Addresses only ever grow, where the driver would use those of freed segments again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import lcm

from autobatch.core.units import MiB
from autobatch.device.allocator.ledger import Allocator, BudgetExceeded, CountingAllocator, cuda_oom_text


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


__all__ = [
    "Allocator",
    "AllocatorConfig",
    "BudgetExceeded",
    "CachingAllocator",
    "CountingAllocator",
    "cuda_oom_text",
]


_ADDRESS_SPACE_BYTES = 1 << 47
"""What an expandable segment may grow to; CUDA takes 9/8 of the card, which a lower cap never fills."""


class CachingAllocator:
    """CUDA's caching allocator on one stream; see the module for what is modelled.

    ``limit`` caps the bytes of segments, as ``per_process_memory_fraction`` does. Expandable segments differ
    from CUDA in one point: there the last page may go past the fraction, here never.
    """

    def __init__(self, limit: int | None = None, config: AllocatorConfig | None = None) -> None:
        config = AllocatorConfig() if config is None else config
        self.limit = limit
        self.config = config
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.reserved_bytes: int = 0
        self.peak_reserved_bytes: int = 0
        self.retries: int = 0
        # should_split: a small or expandable block is cut for any rest, a large one only for over 1 MiB.
        tail = 0 if config.expandable_segments else config.small_bytes
        self._small = Pool(page_bytes=config.small_segment_bytes, keeps_tail_bytes=0)
        self._large = Pool(page_bytes=config.large_segment_bytes, keeps_tail_bytes=tail)
        self._next_address = 0

    def malloc(self, size: int) -> Block | None:
        """Take ``size`` bytes; nothing (``None``) for 0, as CUDA does.

        Raises:
            BudgetExceeded: not even after every cached segment was given back.
        """
        if size == 0:
            return None
        config = self.config
        rounded = config.rounded(size)
        pool = self._small if rounded <= config.small_bytes else self._large
        block = pool.take_best_fit(rounded) or self._grow(pool, rounded)
        if block is None:
            self.release()
            self.retries += 1
            block = self._grow(pool, rounded)
        if block is None:
            raise BudgetExceeded(
                requested=size,
                attempted=config.segment_bytes(rounded),
                allocated=self.allocated_bytes,
                reserved=self.reserved_bytes,
                limit=self.limit or 0,
            )
        if block.size - rounded > pool.keeps_tail_bytes:
            pool.insert(block.split(rounded))
        block.held = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, handle: Block | None) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        if handle is None:
            return
        self.allocated_bytes -= handle.size
        handle.held = False
        handle.merge_neighbours()
        handle.pool.insert(handle)

    def release(self) -> None:
        """Give back all segments (expandable: pages) without a live block (``release_cached_blocks``)."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.free):
                if self.config.expandable_segments:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def reset_peak(self) -> None:
        """Start the peaks anew from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _grow(self, pool: Pool, rounded: int) -> Block | None:
        """Make a block of new memory, in no list (``alloc_block``); ``None`` if the cap forbids it."""
        segment_bytes = self.config.segment_bytes(rounded)
        if not self._allows(segment_bytes):
            return None
        if self.config.expandable_segments:
            return self._grow_segment(pool, rounded)
        self._reserve(segment_bytes)
        return Block(pool, self._claim_addresses(segment_bytes), segment_bytes)

    def _grow_segment(self, pool: Pool, rounded: int) -> Block | None:
        """Map pages until a block is large enough (``try_allocate_expandable_block``)."""
        block = _lowest_with_room(pool, rounded)
        if block is None:
            address = self._claim_addresses(_ADDRESS_SPACE_BYTES)
            block = Block(pool, address, _ADDRESS_SPACE_BYTES, mapped=False)
            pool.insert(block)
        while not block.mapped or block.size < rounded:
            unmapped = block
            if block.mapped:
                assert block.next is not None, "a block with room is followed by unmapped space"
                unmapped = block.next
            wanted = rounded - (block.size if block.mapped else 0)
            if not self._map(unmapped, min(wanted, unmapped.size)):
                return None
            block = unmapped
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes of an unmapped block, and merge (``map_block``)."""
        page_bytes = block.pool.page_bytes
        mapped = -(-size // page_bytes) * page_bytes
        if not self._allows(mapped):
            return False
        block.pool.remove(block)
        if mapped < block.size:
            block.pool.insert(block.split(mapped))
        block.mapped = True
        self._reserve(mapped)
        block.merge_neighbours()
        block.pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block (``unmap_block``); segments start on a page boundary."""
        page_bytes = block.pool.page_bytes
        start = -(-block.address // page_bytes) * page_bytes
        end = (block.address + block.size) // page_bytes * page_bytes
        if end <= start:
            return
        pool = block.pool
        pool.remove(block)
        if start > block.address:
            rest = block.split(start - block.address)
            pool.insert(block)
            block = rest
        if end < block.address + block.size:
            pool.insert(block.split(end - block.address))
        self.reserved_bytes -= block.size
        block.mapped = False
        block.merge_neighbours()
        pool.insert(block)

    def _allows(self, size: int) -> bool:
        return self.limit is None or self.reserved_bytes + size <= self.limit

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _claim_addresses(self, size: int) -> int:
        # So that the pages of either size start at multiples of it.
        alignment = lcm(self.config.large_segment_bytes, self.config.small_segment_bytes)
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + size
        return address


def _lowest_with_room(pool: Pool, size: int) -> Block | None:
    """The lowest run of free and unmapped blocks of at least ``size`` bytes (``find_expandable_block``)."""
    for _, unmapped in pool.unmapped:
        first = (
            unmapped.previous if unmapped.previous is not None and not unmapped.previous.held else unmapped
        )
        room = 0
        block: Block | None = first
        while room < size and block is not None and not block.held:
            room += block.size
            block = block.next
        if room >= size:
            return first
    return None
