"""The joined micro-batches of each window, ahead of the loop or sample by sample reproducible.

Where samples are seeded, what a data set draws at random for one (augmentation) depends on the run's seed,
the window, the sample's place in it and its number alone: it is the same for any number of workers, any
micro-batch, after a window was run again, and after a resume. Seeded are the generators that are drawn from
by default: Python's, NumPy's and torch's for the CPU. A generator that a data set keeps for itself is its
own matter. So are sums that torch spreads over its threads, of which a worker has one.

A collate that draws is seeded too, by the first sample of its micro-batch: the same for any number of
workers, and another for another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from autobatch.planning import micro_batches
from autobatch.workload.contract import Collated
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import capture_random_state, restore_random_state, seed_generators

JOINING = -1
"""Stands for the number of a sample while a micro-batch is joined."""


AHEAD = 2
"""Micro-batches that a worker fetches ahead, as torch's own loader does."""


class MicroBatchIds(NamedTuple):
    """The samples of a micro-batch."""

    window: int
    """Number of its window in the run."""
    first: int
    """Place of its first sample in the window."""
    ids: list[int]


class Feed(Protocol):
    """Gives a loop its micro-batches."""

    def collated(self, window: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """The micro-batches of a window, on the host; a window may be asked for again in smaller ones.

        Raises:
            InputError: the workload's data or collate raised.
        """


@dataclass(frozen=True, kw_only=True)
class SeededCollate:
    """Fetches and joins micro-batches, every sample under a seed of its own."""

    data: Any
    collate: Callable[[list[Any]], Collated] | None
    seed: int
    """Of the run."""

    def __call__(self, part: MicroBatchIds, *, is_asked: Callable[[], bool] = lambda: False) -> Collated:
        """Join a micro-batch, and leave the generators at its last draw; ``None`` once it is asked to stop.

        Data that can fetch many samples at once (``__getitems__``) are asked for one at a time.
        """
        samples: list[Any] = []
        for place, sample in enumerate(part.ids, part.first):
            if is_asked():
                return None
            seed_generators(self.seed, part.window, place, sample)
            samples += fetch(self.data, [sample])
        seed_generators(self.seed, part.window, part.first, JOINING)
        return collate_samples(samples, self.collate, option="Workload(collate=…)")


class SeededFeed:
    """Micro-batches that are joined here, when they are asked for; the loop's generators do not notice."""

    def __init__(self, join: SeededCollate) -> None:
        self._join = join

    def collated(self, window: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """See `Feed`."""
        for part in parts_of(window, micro_batch):
            yield self._one(part)

    def _one(self, part: MicroBatchIds) -> Collated:
        # Those of the cards are not seeded, and so go on.
        before = capture_random_state()._replace(cuda=[])
        try:
            return self._join(part)
        finally:
            restore_random_state(before)


def parts_of(window: GlobalBatch, micro_batch: int) -> Iterator[MicroBatchIds]:
    """A window, split as evenly as can be."""
    first = 0
    for size in micro_batches(len(window.ids), micro_batch):
        yield MicroBatchIds(window.index, first, window.ids[first : first + size])
        first += size
