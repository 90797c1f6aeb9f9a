"""A feed whose micro-batches come from loader workers.

torch's own ``DataLoader`` reads a dataset whose items are whole micro-batches, as one stream for the rest of
the run. Batches are drawn first and split afterwards, so the coming micro-batches are known. If a batch is
run again in smaller micro-batches, the stream starts again at that batch.

Workers ignore the signals that ask the run to stop. A signal to the whole process group would otherwise end
the workers first, and the checkpoint would never be written. The kernel ends the workers with this process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.signals import STOPPING, hold_back_signals
from autobatch.workload.contract import Collated
from autobatch.workload.feed import SeededCollate
from autobatch.workload.order import GlobalBatch
from autobatch.workload.socket_folder import open_socket_folder
from autobatch.workload.split import MicroBatchIds, Split
from autobatch.workload.worker import Failure, MicroBatchDataset, start_method, start_worker
from autobatch.workload.worker_exit import WorkerExits

BatchesFrom: TypeAlias = Callable[[int], Iterator[GlobalBatch]]
"""Returns the batches of the run, from a number on."""
TIME_LIMIT_S = 600.0
"""Longest wait for a micro-batch, generous enough for slow storage."""
POLL_S = 5.0
"""Interval at which a wait checks for crashed workers and the time limit. Intervals are counted, so the time
for which a machine is suspended does not."""


class LoaderWorkerTimeout(AutobatchError, RuntimeError):  # noqa: N818 - an event, as LoaderWorkerCrashed
    """A loader worker sent no micro-batch in time; the message names it, and says what to do."""


class WorkerFeed:
    """Micro-batches from loader workers; see `autobatch.workload.loader.open_feed`.

    Args:
        collate: fetches and collates one micro-batch, in a worker.
        batches: returns the batches of the run, from a number on.
        workers: number of processes.
        prefetch: micro-batches that each worker is ahead by.
        gpu: copy micro-batches to pinned memory for this GPU; None not to copy.
        time_limit_s: longest wait for a micro-batch.
        split: forms the micro-batches; None for equal counts.
        init_worker: the user's function, called in each worker with its number; None for none.
    """

    def __init__(
        self,
        collate: SeededCollate,
        batches: BatchesFrom,
        *,
        workers: int,
        prefetch: int,
        gpu: torch.device | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        split: Split | None = None,
        init_worker: Callable[[int], object] | None = None,
    ) -> None:
        self._collate = collate
        self._split = Split() if split is None else split
        self._time_limit_s = time_limit_s
        self._batches = batches
        self._settings: dict[str, Any] = {
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "pin_memory": gpu is not None,
            "timeout": min(POLL_S, time_limit_s),
        }
        self._gpu = gpu
        self._init_worker = partial(start_worker, init_worker)
        self._context = multiprocessing.get_context(start_method())
        self._stop = self._context.RawValue(ctypes.c_bool, False)
        self._exits = WorkerExits()
        self._stream: Any = None
        self._next: tuple[int, int, int] | None = None
        """Batch, number and size limit of the micro-batch that the stream yields next; None if closed."""

    def collated(self, batch: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """See `autobatch.workload.feed.Feed`.

        Raises:
            InputError: the workload's data or collate function raised in a worker.
            LoaderWorkerCrashed: a worker was killed, or crashed.
            LoaderWorkerTimeout: a worker sent nothing for the time limit.
        """
        count = len(self._split.parts(batch, micro_batch))
        if self._next != (batch.index, 0, micro_batch):
            self._start(batch.index, micro_batch)
        for number in range(1, count + 1):
            following = (batch.index, number) if number < count else (batch.index + 1, 0)
            # Not kept in a variable, so that the loop alone holds a micro-batch while it trains on it.
            yield self._take((*following, micro_batch))

    def close(self) -> None:
        """End the workers, even in the middle of their work."""
        stream, self._stream, self._next = self._stream, None, None
        if stream is None:
            return
        self._stop.value = True
        try:
            stream._shutdown_workers()
        finally:
            self._exits.kill()

    def _start(self, index: int, micro_batch: int) -> None:
        self.close()
        self._stop.value = False
        # The thread that pins memory uses the current GPU.
        on_gpu = nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)
        open_socket_folder()
        try:
            blocked = hold_back_signals(STOPPING, with_tracker=start_method() != "fork")
            with self._exits.starting(), blocked, _worker_warnings_ignored(), on_gpu:
                self._stream = iter(self._loader(index, micro_batch))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the workload's data or collate function cannot be sent to a loader worker ({error}): "
                "define both at the top level of a module, or use --workers 0"
            ) from error
        self._next = (index, 0, micro_batch)

    def _loader(self, index: int, micro_batch: int) -> DataLoader[Collated]:
        return DataLoader(
            MicroBatchDataset(self._collate, self._stop),
            batch_size=None,
            sampler=_MicroBatchSampler(self._batches, self._split, index, micro_batch),
            collate_fn=_unchanged,
            worker_init_fn=self._init_worker,
            # A generator of its own, so that the run's generators are not drawn from.
            generator=torch.Generator(),
            multiprocessing_context=self._context,
            **self._settings,
        )

    def _take(self, following: tuple[int, int, int]) -> Collated:
        self._exits.check()
        found = self._wait()
        if isinstance(found, Failure):
            raise found.error
        self._next = following
        return found

    def _wait(self) -> Any:
        """Return the next item of the stream, and check the workers at each poll."""
        interval_s = self._settings["timeout"]
        waited_s = 0.0
        while True:
            try:
                with self._exits.waiting():
                    return next(self._stream)
            except RuntimeError as error:
                # torch raises this after each poll; the stream then continues where it was.
                if not str(error).startswith("DataLoader timed out after"):
                    raise
            waited_s += interval_s
            if waited_s >= self._time_limit_s:
                raise LoaderWorkerTimeout(
                    f"{self._awaited_worker()} sent no micro-batch within the limit of "
                    f"{self._time_limit_s:g} s, so the data or the collate function of the workload hangs: "
                    "fetch without workers (--workers 0) to see where"
                )

    def _awaited_worker(self) -> str:
        """Name the worker that makes the next micro-batch."""
        stream = self._stream
        number = stream._task_info[stream._rcvd_idx][0]
        return f"loader worker {stream._workers[number].pid} (number {number} of {len(stream._workers)})"


class _MicroBatchSampler:
    """The sample ids of all micro-batches in the rest of the run, in order."""

    def __init__(self, batches: BatchesFrom, split: Split, first: int, micro_batch: int) -> None:
        self._batches = batches
        self._split = split
        self._first = first
        self._micro_batch = micro_batch

    def __iter__(self) -> Iterator[MicroBatchIds]:
        for batch in self._batches(self._first):
            yield from self._split.parts(batch, self._micro_batch)


def _unchanged(batch: Collated) -> Collated:
    """Return a micro-batch unchanged; torch's default would turn its arrays into tensors."""
    return batch


@contextmanager
def _worker_warnings_ignored() -> Iterator[None]:
    """Ignore within the block the warnings about workers that the user asked for."""
    with warnings.catch_warnings():
        # Python warns of a fork while threads run, but a worker uses none of their objects.
        warnings.simplefilter("ignore", DeprecationWarning)
        # torch warns of more workers than CPUs, but this number was asked for.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield
