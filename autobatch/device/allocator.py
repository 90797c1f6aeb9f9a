"""Allocators of a budget of bytes: one that only counts, and a model of CUDA's caching allocator.

`CachingAllocator` follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13: rounding, pools, segments, best
fit, splitting, merging and the per-process cap. It does not use torch, so a trace replays in milliseconds.

CUDA's releases cached segments and tries again before an error. The model does not: a step that needs that
does not count as fitting, as each later step would do so too, and take several times as long.

Each stream has pools of its own, and all count together. Not modelled: blocks that a second stream uses
(``record_stream``), private pools (CUDA graphs), ``max_split_size_mb`` and other options that are off by
default. Among free blocks of the same size, torch 2.13 takes that of the oldest segment, as if addresses only
grew. Up to 2.11 it takes the lowest, so the order of the segments counts, which the driver decides. Here
addresses only grow or only fall, and none is used again, unless the caller gives a source of addresses.

Recordings of real GPUs confirm the model (tests/recordings): with the driver's addresses of segments, it puts
each block where the GPU put it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autobatch.core.units import MiB, format_bytes


class MemoryStats(NamedTuple):
    """Readings of an allocator, in bytes; None if the device has no such figure."""

    allocated_bytes: int | None = None
    """Held by live tensors."""
    reserved_bytes: int | None = None
    """Held by the allocator, cached blocks included."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    retries: int | None = None
    """Allocations that succeeded only after cached segments were freed."""


class Allocator:
    """An allocator that counts live bytes against a limit, without rounding and without a cache.

    Args:
        limit: the most bytes; None for no limit.
    """

    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    is_expandable: bool | None = None
    """True if its segments grow; None if it has none."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    def malloc(self, size: int, stream: int = 0) -> Any:
        """Take ``size`` bytes on a stream and return a handle for `free`.

        Raises:
            BudgetExceeded: They do not fit. Live blocks are unchanged.
        """
        allocated = self.allocated_bytes + size
        if self.limit is not None and allocated > self.limit:
            raise BudgetExceeded(size, self)
        self.allocated_bytes = allocated
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        return size

    def free(self, handle: Any) -> None:
        """Free a handle of `malloc`, once."""
        self.allocated_bytes -= handle

    def release(self) -> None:
        """Free cached memory."""

    def stats(self) -> MemoryStats:
        """Return the figures."""
        return MemoryStats(
            self.allocated_bytes,
            self.reserved_bytes,
            self.peak_allocated_bytes,
            self.peak_reserved_bytes,
        )


class BudgetExceeded(Exception):  # noqa: N818 - callers translate it; it is no fault
    """The refusal of a request, with the words and the figures of CUDA's own message.

    Args:
        attempted: Bytes that the allocator needed: those that were asked for, or a whole segment.
        allocator: The allocator that refused, as it is now.
    """

    def __init__(self, attempted: int, allocator: Allocator) -> None:
        limit, allocated, reserved = allocator.limit or 0, allocator.allocated_bytes, allocator.reserved_bytes
        held = allocated if reserved is None else reserved
        idle = f", and {format_bytes(held - allocated)} is reserved by PyTorch but unallocated"
        super().__init__(
            f"Tried to allocate {format_bytes(attempted)}. {format_bytes(limit)} allowed, of which "
            f"{format_bytes(limit - held)} is free; {format_bytes(allocated)} is allocated by PyTorch"
            + ("" if reserved is None else idle)
        )


ROUND_BYTES = 512
"""Granularity of all sizes (``round_size``): ``kMinBlockSize``."""
SMALL_BYTES = 1 * MiB
"""Largest request of the small pool, and largest unsplit tail of a large block: ``kSmallSize``."""
SMALL_SEGMENT_BYTES = 2 * MiB
"""Segment that small requests share, and page of an expandable one: ``kSmallBuffer``."""
LARGE_SEGMENT_BYTES = 20 * MiB
"""Segment of requests from 1 to 10 MiB, and page of an expandable one: ``large_segment_size()``."""
OWN_SEGMENT_BYTES = 10 * MiB
"""Smallest request with a segment of its own size: ``kMinLargeAlloc``."""
SEGMENT_ROUND_BYTES = 2 * MiB
"""Granularity of such segments: ``kRoundLarge``."""

ADDRESS_SPACE_BYTES = 1 << 47
"""Size of an expandable segment. CUDA uses 9/8 of the GPU's memory, which the cap never reaches."""


def segment_bytes(rounded: int) -> int:
    """Return the bytes to request from the driver for a new segment (``get_allocation_size``)."""
    if rounded <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses in a segment: held, free, or (in expandable segments) not mapped."""

    pool: Pool
    address: int
    size: int
    mapped: bool = True
    held: bool = False
    previous: Block | None = None
    next: Block | None = None

    def split(self, size: int) -> Block:
        """Split the block after ``size`` bytes: keep the front, and return the rest, linked after it."""
        rest = Block(self.pool, self.address + size, self.size - size, self.mapped, False, self, self.next)
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def merge_neighbours(self) -> None:
        """Merge with neighbours in the same state (``try_merge_blocks``); the block must be in no list."""
        for other in (self.previous, self.next):
            if other is None or other.held or other.mapped != self.mapped:
                continue
            other.pool.remove(other)
            self.size += other.size
            if other is self.next:
                self.next = other.next
                if self.next is not None:
                    self.next.previous = self
            else:
                self.address, self.previous = other.address, other.previous
                if self.previous is not None:
                    self.previous.next = self


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of one kind (small or large), and unmapped blocks of its expandable segments."""

    page_bytes: int
    keeps_tail_bytes: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    def insert(self, block: Block) -> None:
        """List a block that is not held, with the free blocks if it is mapped."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block from its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def take_best_fit(self, size: int) -> Block | None:
        """Remove and return the smallest free block of at least ``size`` bytes, lowest address first.

        The model of ``get_free_block``; None if there is no such block. A block that can grow into unmapped
        space counts with the size that it could reach, so a slightly larger block that cannot is preferred.
        """
        free = self.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if self.unmapped:
            while at + 1 < len(free) and _reach(free[at + 1][2]) < _reach(free[at][2]):
                at += 1
        return free.pop(at)[2]

    def lowest_with_room(self, size: int) -> Block | None:
        """Return the lowest run of free and unmapped blocks of at least so many bytes, or None.

        The model of ``find_expandable_block``.
        """
        for _, unmapped in self.unmapped:
            before = unmapped.previous
            first = before if before is not None and not before.held else unmapped
            room = 0
            block: Block | None = first
            while room < size and block is not None and not block.held:
                room += block.size
                block = block.next
            if room >= size:
                return first
        return None


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


class CachingAllocator(Allocator):
    """CUDA's caching allocator; the module lists what is modelled.

    Expandable segments differ from CUDA's in one point: CUDA's last page may exceed the fraction.

    Args:
        limit: The cap of the bytes of segments, as ``per_process_memory_fraction`` sets it. None for no cap.
        expandable: One growing segment per pool instead of many fixed ones (``expandable_segments:True``).
        falls: Each new segment lies below those before it; False: above.
        held_bytes: Bytes that the process holds already, as one block that nothing frees.
        addresses: Source of the addresses of segments: called with the bytes of a new one. None for addresses
            that grow or fall.
    """

    def __init__(
        self,
        limit: int | None = None,
        expandable: bool = False,
        *,
        falls: bool = False,
        held_bytes: int = 0,
        addresses: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(limit)
        self.is_expandable = expandable
        self.reserved_bytes: int = 0
        self.peak_reserved_bytes: int = 0
        # should_split: a small or expandable block is split for any rest, a large one only for over 1 MiB.
        tail = 0 if expandable else SMALL_BYTES
        self._pools: defaultdict[int, tuple[Pool, Pool]] = defaultdict(
            lambda: (Pool(SMALL_SEGMENT_BYTES, 0), Pool(LARGE_SEGMENT_BYTES, tail))
        )
        """The pools of each stream: for small requests and for large ones."""
        self._addresses = self._fresh_address if addresses is None else addresses
        self._next_address, self._falls = 0, falls
        if held_bytes:
            # Even if that is more than the limit, which only new segments are held against.
            self.limit = None
            self.malloc(held_bytes)
            self.limit = limit

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """Take ``size`` bytes on a stream; None for 0 bytes, like CUDA.

        Raises:
            BudgetExceeded: They do not fit, with the cached segments as they are.
        """
        if size == 0:
            return None
        rounded = -(-size // ROUND_BYTES) * ROUND_BYTES
        pool = self._pools[stream][rounded > SMALL_BYTES]
        block = pool.take_best_fit(rounded) or self._grow(pool, rounded)
        if block is None:
            raise BudgetExceeded(segment_bytes(rounded), self)
        if block.size - rounded > pool.keeps_tail_bytes:
            pool.insert(block.split(rounded))
        block.held = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:  # noqa: PLR1730 - a tenth of the time of max
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, handle: Block | None) -> None:
        """Return a block to its pool, merged with its free neighbours."""
        if handle is None:
            return
        self.allocated_bytes -= handle.size
        handle.held = False
        handle.merge_neighbours()
        handle.pool.insert(handle)

    def release(self) -> None:
        """Free all segments (expandable: pages) without a live block (``release_cached_blocks``)."""
        for pool in [pool for pools in self._pools.values() for pool in reversed(pools)]:
            for _, _, block in list(pool.free):
                if self.is_expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _grow(self, pool: Pool, rounded: int) -> Block | None:
        """Make a block of new memory, in no list; None if the cap forbids it.

        The model of ``alloc_block``, and of ``try_allocate_expandable_block``, which maps pages until a block
        is large enough.
        """
        size = segment_bytes(rounded)
        if not self._allows(size):
            return None
        if not self.is_expandable:
            self._reserve(size)
            return Block(pool, self._addresses(size), size)
        block = pool.lowest_with_room(rounded)
        if block is None:
            block = Block(pool, self._addresses(ADDRESS_SPACE_BYTES), ADDRESS_SPACE_BYTES, mapped=False)
            pool.insert(block)
        while not block.mapped or block.size < rounded:
            unmapped = block.next if block.mapped else block
            assert unmapped is not None, "a block with room is followed by unmapped space"
            wanted = rounded - (block.size if block.mapped else 0)
            if not self._map(unmapped, min(wanted, unmapped.size)):
                return None
            block = unmapped
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes of an unmapped block and merge it (``map_block``)."""
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
        """Unmap the whole pages of a free block (``unmap_block``). Segments start at a page boundary."""
        pool, page_bytes = block.pool, block.pool.page_bytes
        start = -(-block.address // page_bytes) * page_bytes
        end = (block.address + block.size) // page_bytes * page_bytes
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            front, block = block, block.split(start - block.address)
            pool.insert(front)
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

    def _fresh_address(self, size: int) -> int:
        # Pages of either size then start at multiples of that size.
        size = -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        if self._falls:
            self._next_address -= size
            return self._next_address
        self._next_address += size
        return self._next_address - size


NewAllocator = Callable[[int | None], Allocator]
"""Makes an empty model of a device's allocator with a limit, None for none."""
