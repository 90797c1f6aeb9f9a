"""The micro-batches of one batch, made on the host one by one."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.training.phase_times import PhaseTimes
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.split import MicroBatchIds


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
        self.count = 0
        """Micro-batches that were asked for."""

    def __iter__(self) -> Fetched:
        """Return itself."""
        return self

    def __next__(self) -> tuple[Collated, int]:
        """Return the next micro-batch with its number of samples."""
        if self._times.is_timing:
            self._times.lap("data")
        if self.count == len(self._parts):
            raise StopIteration
        ids = self._parts[self.count].ids
        self.count += 1
        return (load_micro_batch(self._workload, ids) if self._fed is None else next(self._fed)), len(ids)
