"""Replay of real batches in a model of the allocator, with a shape of its own for each micro-batch.

Many shapes fragment an allocator, so that a micro-batch may run out of memory although a costlier one fits
alone. The replay shows that in milliseconds per batch.

A block keeps its traced number as a name. Micro-batches after the third repeat the third, for which the
blocks that one of them leaves are renamed to those of the second. What a step leaves is freed at the first
free of the next step that concerns an earlier one, or before that step if there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autobatch.device.allocator.ledger import Allocator, BudgetExceeded
from autobatch.footprint.size_program import Part, Shape, SizeProgram


def replay_batches(
    program: SizeProgram, batches: Iterable[Sequence[Shape]], allocator: Allocator, *, most_events: int
) -> int | None:
    """Replay batches from the first step on.

    Args:
        program: the parts of a step.
        batches: the micro-batches of each batch, in order.
        allocator: empty, with the budget as its limit.
        most_events: events after which no further batch is replayed.

    Returns:
        The number of batches that were replayed; None if one does not fit.
    """
    run = _Run(program, allocator)
    count = 0
    for shapes in batches:
        if count and run.events > most_events:
            break
        try:
            run.batch(shapes, is_first=count == 0)
        except BudgetExceeded:
            return None
        count += 1
    return count


class _Run:
    """The state of a replay between two batches."""

    def __init__(self, program: SizeProgram, allocator: Allocator) -> None:
        self._program = program
        self._allocator = allocator
        self._live: dict[int, Any] = {}
        """Handle of each live block, by its traced number."""
        self._left: list[Any] = []
        """Handles that earlier steps and micro-batches left."""
        self._sizes: dict[tuple[int, Shape], list[int]] = {}
        self.events = 0
        self._persistent = set(program.setup.blocks) | set(program.opening_step.blocks)
        freed = {
            block
            for part in (program.opening_step, program.single, program.single_step, program.first)
            for block, is_free in part.events
            if is_free
        }
        self._persistent |= set(program.opening.blocks) - freed
        self._frees_earlier = {
            id(part): any(is_free and block not in part.blocks for block, is_free in part.events)
            for part in (program.single, program.first)
        }
        # A model that keeps tensors in its first pass allocates otherwise there than later.
        self._opens_alike = program.opening.is_like(program.first)

    def batch(self, shapes: Sequence[Shape], *, is_first: bool) -> None:
        """Run a batch.

        Raises:
            BudgetExceeded: a block does not fit.
        """
        program = self._program
        if is_first:
            self._play(program.setup, shapes[0])
            self._play(program.opening, shapes[0])
            if len(shapes) > 1 and self._opens_alike:
                self._rename(program.opening, program.first)
                self._rest(shapes)
                self._rename(program.first, program.opening)
            self._play(program.opening_step, shapes[-1])
        elif len(shapes) == 1:
            self._begin(program.single, shapes[0])
            self._play(program.single_step, shapes[0])
        else:
            self._begin(program.first, shapes[0])
            self._rest(shapes)
            self._play(program.step, shapes[-1])
        self._leave()

    def _begin(self, part: Part, shape: Shape) -> None:
        """Run the first micro-batch of a step."""
        if not self._frees_earlier[id(part)]:
            self._free_left()
        self._play(part, shape)

    def _rest(self, shapes: Sequence[Shape]) -> None:
        """Run the micro-batches after the first; afterwards their blocks have the names of the third."""
        program = self._program
        self._play(program.second, shapes[1])
        for shape in shapes[2:]:
            self._play(program.later, shape)
            self._rename(program.later, program.second)
        self._rename(program.second, program.later)

    def _play(self, part: Part, shape: Shape) -> None:
        """Run the events of a part at a shape.

        Raises:
            BudgetExceeded: a block does not fit.
        """
        key = (id(part), shape)
        if key not in self._sizes:
            self._sizes[key] = part.sizes_at(shape)
        sizes = iter(self._sizes[key])
        live, malloc, free = self._live, self._allocator.malloc, self._allocator.free
        self.events += len(part.events)
        for block, is_free in part.events:
            if not is_free:
                live[block] = malloc(next(sizes))
            elif block in live:
                free(live.pop(block))
            elif self._left:
                self._free_left()

    def _rename(self, before: Part, after: Part) -> None:
        """Give the live blocks of a part the names of another; what has these names already is left over."""
        live = self._live
        if not live.keys().isdisjoint(before.blocks):
            for old, new in zip(before.blocks, after.blocks, strict=True):
                if old in live:
                    if new in live:
                        self._left.append(live.pop(new))
                    live[new] = live.pop(old)

    def _leave(self) -> None:
        """End a step: all but what lasts is freed in the next one."""
        self._free_left()
        for block in [block for block in self._live if block not in self._persistent]:
            self._left.append(self._live.pop(block))

    def _free_left(self) -> None:
        for handle in self._left:
            self._allocator.free(handle)
        self._left.clear()
