"""The live bytes of a program at any micro-batch, as arrays: no replay, for allocators that only count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Rule(Protocol):
    """The size of a block as a function of the micro-batch."""

    def at(self, m: int) -> int:
        """Return the size in bytes."""


class LiveBytes:
    """The bytes that a program holds after each of its events.

    Args:
        events: ``(block, size)`` for an allocation, ``(block, None)`` for a free; frees of unknown blocks are
            left out.
    """

    def __init__(self, events: Sequence[tuple[int, Rule | None]]) -> None:
        numbers: dict[Rule, int] = {}
        held: dict[int, int] = {}
        changes: list[int] = []
        """The number of a rule, from 1, with the sign of what happens to a block of its size."""
        for block, rule in events:
            if rule is not None:
                held[block] = numbers.setdefault(rule, len(numbers) + 1)
                changes.append(held[block])
            elif block in held:
                changes.append(-held.pop(block))
        self._rules = list(numbers)
        self._numbers = np.abs(changes, dtype=np.intp) if changes else np.zeros(0, np.intp)
        self._signs = np.sign(changes, dtype=np.int8) if changes else np.zeros(0, np.int8)

    def peak_at(self, m: int) -> int:
        """Return the most bytes that are live at the same time at micro-batch ``m``.

        Raises:
            Untraceable: a size would be negative there.
        """
        sizes = np.array([0, *(rule.at(m) for rule in self._rules)], np.int64)
        live = np.cumsum(sizes[self._numbers] * self._signs)
        return int(live.max(initial=0))
