"""The micro-batches of one batch, made on the host one by one, and the one of them that runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

from autobatch.device.host import host_memory
from autobatch.training.phase_times import PhaseTimes
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of
from autobatch.workload.split import MicroBatchIds, Split

COPIES = 4
"""Copies of a kept batch on the host while it is compared with its micro-batches."""
HOST_SHARE = 0.25
"""Share of the available host memory that these copies may take."""


class KeptBatch:
    """Copies of the micro-batches of a batch, as far as a share of the host memory allows."""

    def __init__(self) -> None:
        self.micro_batches: list[tuple[Collated, int]] = []
        available = host_memory().available_bytes
        self._most = float("inf") if available is None else HOST_SHARE * available / COPIES
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(size for _, size in self.micro_batches)

    def clear(self) -> None:
        """Forget all micro-batches, because the batch begins anew."""
        self.micro_batches.clear()
        self._bytes = 0

    def add(self, batch: Collated, size: int) -> None:
        """Keep a copy of a micro-batch, because a loss may change its own."""
        self._bytes += sum(tensor.nbytes for tensor in tensors_of(batch))
        if self._bytes > self._most:
            return
        try:
            self.micro_batches.append((copy.deepcopy(batch), size))
        except Exception:  # what cannot be copied is not compared
            self._most = 0


class Fetched:
    """Iterator over the micro-batches of a batch, none of which it holds.

    Args:
        workload: makes the micro-batches, if nothing else does.
        parts: their sample ids.
        fed: the collated micro-batches; None to make them here.
        times: told when a micro-batch is asked for.
        kept: gets a copy of each; None to keep none.
    """

    def __init__(
        self,
        workload: Workload,
        parts: list[MicroBatchIds],
        fed: Iterator[Collated] | None,
        times: PhaseTimes,
        kept: KeptBatch | None = None,
    ) -> None:
        self._workload = workload
        self._parts = parts
        self._fed = fed
        self._times = times
        self._kept = kept
        self._count = 0
        if kept is not None:
            kept.clear()

    def __iter__(self) -> Fetched:
        """Return itself."""
        return self

    def __next__(self) -> tuple[Collated, int]:
        """Return the next micro-batch with its number of samples."""
        if self._times.is_timing:
            self._times.lap("data")
        if self._count == len(self._parts):
            raise StopIteration
        ids = self._parts[self._count].ids
        self._count += 1
        batch = load_micro_batch(self._workload, ids) if self._fed is None else next(self._fed)
        if self._kept is not None:
            self._kept.add(batch, len(ids))
        return batch, len(ids)


class Running:
    """The micro-batches of a batch as they run, none of which it holds.

    Args:
        parts: their sample ids.
        placed: the micro-batches, each with its number of samples; iterated again for a second pass.
        runs_twice: whether a loss over the whole batch comes between two passes.
    """

    def __init__(
        self, parts: list[MicroBatchIds], placed: Iterable[tuple[Collated, int]], *, runs_twice: bool
    ) -> None:
        self._parts = parts
        self._placed = placed
        self._left: Iterator[tuple[Collated, int]] = iter(())
        self._place: int | None = None
        self._has_begun = False
        self._passes_left = 2 if runs_twice else 1

    @property
    def is_in_loss(self) -> bool:
        """True between the two passes, when the loss over the whole batch runs."""
        return self._has_begun and self._place is None and self._passes_left == 1

    def __iter__(self) -> Running:
        """Begin a pass."""
        self._left, self._place = iter(self._placed), None
        return self

    def __next__(self) -> tuple[Collated, int]:
        """Return the next micro-batch with its number of samples."""
        self._has_begun = True
        self._place = 0 if self._place is None else self._place + 1
        try:
            return next(self._left)
        except StopIteration:
            self._place = None
            self._passes_left -= 1
            raise

    def end(self) -> None:
        """End all passes."""
        self._place = None
        self._passes_left = 0

    def blamed(self, split: Split, micro_batch: int) -> tuple[int, int]:
        """Return what ran out of memory: the micro-batch that runs, or the fullest one if none does.

        Args:
            split: made the micro-batches.
            micro_batch: the largest one.

        Returns:
            Its samples, and the ``micro_batch`` that halves it; both 1 for a rank without samples.
        """
        if not self._parts:
            return 1, 1
        fullest = max(self._parts, key=lambda part: split.halved(part, micro_batch))
        part = fullest if self._place is None else self._parts[self._place]
        return len(part.ids), split.halved(part, micro_batch)
