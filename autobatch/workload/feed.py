"""The collated micro-batches of each batch, from this process or from loader workers.

If samples are seeded, the random draws of a dataset for one sample (augmentation) depend on four numbers
alone: the run's seed, the batch, the sample's place in it, and the sample's index. They are the same for any
number of workers, for any micro-batch, after a batch was run again, and after a resume. Only the default
generators are seeded, those of Python, of NumPy, and of torch for the CPU. A dataset's own generator is not.
Sums that torch spreads over threads may still differ, because a worker has one thread.

A collate function that draws is seeded by the first sample of its micro-batch: the same for any number of
workers, but different for another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from autobatch.workload.contract import Collated
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import capture_random_state, restore_random_state, seed_generators
from autobatch.workload.split import MicroBatchIds, Split

COLLATING = -1
"""Takes the place of a sample's index in the seed of a collate function."""
AHEAD = 2
"""Micro-batches that a worker fetches ahead, as in torch's own loader."""


class Feed(Protocol):
    """Source of a loop's micro-batches, as its `autobatch.workload.split.Split` forms them."""

    def collated(self, batch: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """Yield the collated micro-batches of a batch, on the host.

        The loop may ask for the same batch again, in smaller micro-batches.

        Args:
            batch: its sample ids.
            micro_batch: the largest number of samples in a micro-batch.

        Raises:
            InputError: the workload's data or collate function raised.
        """


@dataclass(frozen=True, kw_only=True)
class SeededCollate:
    """A function that fetches and collates a micro-batch, with a seed of its own for every sample."""

    data: Any
    collate: Callable[[list[Any]], Collated] | None
    seed: int
    """Of the run."""

    def __call__(self, part: MicroBatchIds, *, is_asked: Callable[[], bool] = lambda: False) -> Collated:
        """Collate a micro-batch, and leave the generators after its last draw.

        Data that can fetch many samples at once (``__getitems__``) are asked for one at a time.

        Args:
            part: the sample ids.
            is_asked: whether to stop early, asked before every sample.

        Returns:
            None if it was asked to stop.
        """
        samples: list[Any] = []
        for place, sample in zip(part.places, part.ids, strict=True):
            if is_asked():
                return None
            seed_generators(self.seed, part.batch_index, place, sample)
            samples += fetch(self.data, [sample])
        seed_generators(self.seed, part.batch_index, part.places[0], COLLATING)
        return collate_samples(samples, self.collate, option="Workload(collate=…)")


class SeededFeed:
    """Micro-batches that this process collates on demand, without a trace in the loop's generators."""

    def __init__(self, collate: SeededCollate, split: Split) -> None:
        self._collate = collate
        self._split = split

    def collated(self, batch: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """See `Feed`."""
        for part in self._split.parts(batch, micro_batch):
            yield self._collated(part)

    def _collated(self, part: MicroBatchIds) -> Collated:
        # GPU generators are not seeded, so they are not restored either.
        before = capture_random_state()._replace(cuda=[])
        try:
            return self._collate(part)
        finally:
            restore_random_state(before)
