"""The micro-batches of one batch, made on the host one by one, and the one of them that runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autobatch.training.phase_times import PhaseTimes
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.split import MicroBatchIds, Split


class Fetched:
    """Iterator over the micro-batches of a batch, none of which it holds.

    Args:
        workload: makes the micro-batches, if nothing else does.
        parts: their sample ids.
        fed: the collated micro-batches; None to make them here.
        times: told when a micro-batch is asked for.
    """

    def __init__(
        self,
        workload: Workload,
        parts: list[MicroBatchIds],
        fed: Iterator[Collated] | None,
        times: PhaseTimes,
    ) -> None:
        self._workload = workload
        self._parts = parts
        self._fed = fed
        self._times = times
        self._count = 0

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
        return (load_micro_batch(self._workload, ids) if self._fed is None else next(self._fed)), len(ids)


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
