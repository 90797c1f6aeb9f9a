"""The split of a batch into micro-batches.

A split decides which samples share a micro-batch, and in what order micro-batches run. It changes no batch
and no gradient, because a step divides Σ totals by Σ counts. The loop, the feeds and the loader workers all
ask it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autobatch.planning import micro_batches
from autobatch.workload.order import GlobalBatch


class MicroBatchIds(NamedTuple):
    """The sample ids of a micro-batch."""

    batch_index: int
    """Number of its batch in the run."""
    places: Sequence[int]
    """Place of each sample in the batch as it was drawn, which seeds its random draws."""
    ids: list[int]


class Split(Protocol):
    """A rule that splits a batch. One number, ``micro_batch``, shrinks it after an out-of-memory error."""

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """Split a batch.

        Args:
            batch: its sample ids.
            micro_batch: the largest number of samples in any micro-batch.
        """

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """Return the ``micro_batch`` that halves a part, which ran out of memory."""

    def of_longest(self, micro_batch: int) -> int:
        """Return the largest micro-batch of the most expensive samples."""


@dataclass(frozen=True)
class CountSplit:
    """Micro-batches of equal counts, in the order of the batch; the counts differ by at most one unit."""

    multiple: int = 1
    """Unit of the counts."""

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """See `Split`."""
        found, first = [], 0
        for size in micro_batches(len(batch.ids), micro_batch, self.multiple):
            places = range(first, first + size)
            found.append(MicroBatchIds(batch.index, places, batch.ids[first : first + size]))
            first += size
        return found

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `Split`."""
        del micro_batch
        return self.multiple * math.ceil(len(part.ids) / self.multiple / 2)

    def of_longest(self, micro_batch: int) -> int:
        """See `Split`."""
        return micro_batch
