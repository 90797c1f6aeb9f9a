"""Blocks of the caching allocator's segments, and the pools that list those that are not held."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A range of addresses in a segment: held, free, or (in expandable segments) not mapped."""

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
        """Split the block after ``size`` bytes: keep the front, and return the rest, linked after it."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def merge_neighbours(self) -> None:
        """Merge with neighbours in the same state (``try_merge_blocks``); the block must be in no list."""
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
    """Free blocks of one kind (small or large), and unmapped blocks of its expandable segments."""

    __slots__ = ("free", "keeps_tail_bytes", "page_bytes", "unmapped")

    def __init__(self, *, page_bytes: int, keeps_tail_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.keeps_tail_bytes = keeps_tail_bytes
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

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
        """Return the lowest run of free and unmapped blocks of at least ``size`` bytes.

        The model of ``find_expandable_block``; None if there is no such run.
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
