"""The micro-batches of a run, made by this process or by the worker processes of torch's ``DataLoader``.

With workers, a ``DataLoader`` reads a dataset whose items are whole micro-batches, as one stream for the rest
of the run. Batches are drawn first and split afterwards, so the coming micro-batches are known. If a batch
runs again in smaller micro-batches, the stream starts again at that batch.

If samples are seeded, the random draws of a dataset for one sample (augmentation) depend on four numbers
alone: the run's seed, the batch, the sample's place in it, and the sample's index. They are the same for any
number of workers, for any micro-batch, after a batch was run again, and after a resume. Only the default
generators are seeded, those of Python, of NumPy, and of torch for the CPU. A dataset's own generator is not.
Sums that torch spreads over threads may still differ, because a worker has one thread. A collate function
that draws is seeded by the first sample of its micro-batch.

Workers ignore the signals that ask the run to stop. A signal to the whole process group would otherwise end
the workers first, and the checkpoint would never be written. The kernel ends the workers with this process.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from threading import Condition
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from autobatch.core.errors import AutobatchError
from autobatch.core.signals import STOPPING, end_with_parent, hold_back_signals
from autobatch.device.oom import Verdict, classify
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.order import GlobalBatchSampler, MicroBatchIds, SizeSplit, Split
from autobatch.workload.rng import preserved_random_state, seed_cpu
from autobatch.workload.streams import StreamSampler, unchanged
from autobatch.workload.user_code import to_picklable, user_code

AHEAD = 2
"""Micro-batches that a worker fetches ahead, as in torch's own loader."""
LONGEST_SOCKET = 107 if sys.platform == "linux" else 103
"""Bytes in the path of a socket (``sun_path`` in unix(7), without its final zero)."""
PATIENCE = 1800
"""Seconds after which a loop no longer waits for its workers, for example if a batch cannot be pickled."""
CHECK_S = 5
"""Seconds between two looks whether a worker has ended, as in torch's loader. Its signal may be early."""
START_METHOD = "fork" if sys.platform == "linux" else None
"""Start method of workers; None for Python's default. Fork is safe on Linux: the workload need not be
importable, and its data is not copied."""
TAKES_LOCK = (Condition.__enter__.__code__, Condition.__exit__.__code__)
"""Functions that hold a lock for which nobody answers yet, or any more."""
RETRY_S = 0.01
"""Time until the handler of a signal that came while a lock was being taken is called again."""
COLLATING = -1
"""Takes the place of a sample's index in the seed of a collate function."""


class MicroBatches(Dataset[Any]):
    """The micro-batches of a workload, each by its sample ids.

    Args:
        data: the samples by their ids.
        collate: the workload's function; None for torch's default.
        seed: of the run, to seed every sample; None to draw from the generators as they are.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Collated] | None, seed: int | None) -> None:
        self._data, self._collate, self._seed = data, collate, seed

    def load(self, part: MicroBatchIds) -> Collated:
        """Fetch and collate a micro-batch; seeded samples leave no trace in the generators.

        Raises:
            InputError: the samples cannot be collated.
        """
        if self._seed is None:
            return collate_samples(fetch(self._data, part.ids), self._collate)
        samples: list[Any] = []
        with preserved_random_state(gpus=False):
            for place, sample in zip(part.places, part.ids, strict=True):
                seed_cpu(self._seed, part.batch_index, place, sample)
                # One at a time, even from data that can fetch many at once (``__getitems__``).
                samples += fetch(self._data, [sample])
            seed_cpu(self._seed, part.batch_index, part.places[0], COLLATING)
            return collate_samples(samples, self._collate)

    def __getitem__(self, part: MicroBatchIds) -> Collated | AutobatchError:
        """Return a micro-batch in a worker, or the error that prevented it, of which torch keeps no notes."""
        try:
            return self.load(part)
        except (Exception, SystemExit) as error:
            if classify(error) is not Verdict.NONE:
                raise  # torch sends its type and text to the loop, and the recovery needs both
            return to_picklable(error)


class Feed:
    """Source of a loop's micro-batches, which this process collates on demand, or its workers ahead.

    Args:
        workload: has the data and the collate function.
        sampler: the batches of the run.
        split: forms the micro-batches.
        workers: processes that fetch and collate; 0 to do so in the loop. Those of a stream only fetch.
        device: to train on; the workers' micro-batches are copied to pinned memory for a GPU. None if it is
            unknown.
        seeds_samples: seed samples one by one, as they are with workers and in a split by size, which changes
            the order in which they are read. Those of a stream have no seeds.
    """

    def __init__(
        self,
        workload: Workload,
        sampler: GlobalBatchSampler,
        split: Split,
        *,
        workers: int = 0,
        device: torch.device | None = None,
        seeds_samples: bool = False,
    ) -> None:
        self._sampler, self._split = sampler, split
        self._options: dict[str, Any] = {}
        """The workers, as arguments of a ``DataLoader``; empty to collate in this process."""
        if workers:
            open_socket_folder()
            report_ended_workers()
            self._options = {
                "num_workers": workers,
                "timeout": min(CHECK_S, PATIENCE),
                "prefetch_factor": AHEAD,
                "worker_init_fn": partial(start_worker, workload.init_worker),
                "multiprocessing_context": START_METHOD,
            }
        self.seeds_samples = workers > 0 or seeds_samples or isinstance(split, SizeSplit)
        """True if samples are seeded one by one."""
        data = workload.train_data
        if isinstance(sampler, StreamSampler):
            data = sampler.held
            sampler.workers = {**self._options, "timeout": PATIENCE} if workers else {}
            self.seeds_samples, self._options = False, {}
        seed = sampler.seed if self.seeds_samples else None
        self._micro_batches = MicroBatches(data, workload.collate, seed)
        self._gpu = device if device is not None and device.type == "cuda" else None
        self.workers: list[BaseProcess] = []
        self._stream: Any = None
        self._next: tuple[int, int] | None = None
        """Batch and size limit of the micro-batches that the workers send next; None within a batch."""

    def collated(self, parts: list[MicroBatchIds], micro_batch: int) -> Iterator[Collated]:
        """Yield the collated micro-batches of a batch, on the host.

        The loop may ask for the same batch again, in smaller micro-batches.

        Args:
            parts: all micro-batches of the batch on this rank, as the split forms them.
            micro_batch: the largest number of samples in a micro-batch.

        Raises:
            InputError: the workload's data or collate function raised.
        """
        if self._options and parts:
            return self._received(parts[0].batch_index, micro_batch, len(parts))
        # Not kept in a variable, so that the loop alone holds a micro-batch while it trains on it.
        return map(self._micro_batches.load, parts)

    def _received(self, index: int, micro_batch: int, count: int) -> Iterator[Collated]:
        """Yield the micro-batches of a batch as the workers send them."""
        if self._next != (index, micro_batch):
            self._start(index, micro_batch)
        self._next = None
        for left in reversed(range(count)):
            if not left:
                self._next = index + 1, micro_batch
            yield raised_here(self._sent())

    def _sent(self) -> Collated | AutobatchError:
        """Wait for the next micro-batch of the workers. Torch looks at them each time its wait is over."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return next(self._stream)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                if time.monotonic() >= end:
                    raise RuntimeError(f"DataLoader timed out after {PATIENCE} seconds") from error

    def close(self) -> None:
        """End the workers, even in the middle of their work."""
        stream, self._stream, self._next = self._stream, None, None
        try:
            # A traceback may hold the stream, which then cannot end its workers by its own deletion.
            getattr(stream, "_shutdown_workers", lambda: None)()
        finally:
            for process in self.workers:
                process.kill()
                process.join()
            self.workers = []

    def _start(self, index: int, micro_batch: int) -> None:
        """Start new workers, at a batch and with a size limit."""
        self.close()
        parts = (
            part for batch in self._sampler.batches(index) for part in self._split.parts(batch, micro_batch)
        )
        others = multiprocessing.active_children()
        # The thread that pins memory uses the current GPU.
        on_gpu = nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)
        blocked = hold_back_signals(STOPPING, with_tracker=START_METHOD != "fork")
        # An error here is one of pickling the data, where workers are not forked.
        with blocked, on_gpu, user_code("data or collate function"), warnings.catch_warnings():
            # Of a fork while threads run, of which a worker uses none, and of more workers than CPUs.
            warnings.simplefilter("ignore")
            loader = DataLoader(
                self._micro_batches,
                batch_size=None,
                sampler=parts,
                collate_fn=unchanged,
                pin_memory=self._gpu is not None,
                # A generator of its own, so that the run's generators are not drawn from.
                generator=torch.Generator(),
                **self._options,
            )
            try:
                self._stream = iter(loader)
            finally:  # one of them may have ended already, which is an error
                children = multiprocessing.active_children()
                self.workers = [process for process in children if process not in others]


def raised_here(made: Collated | AutobatchError) -> Collated:
    """Return a micro-batch of a worker, or raise the error that prevented it."""
    if isinstance(made, AutobatchError):
        raise made
    return made


def open_socket_folder() -> None:
    """Make this process's folder for the sockets through which its workers send tensors.

    Without it, each worker makes one of its own, and leaves it behind if it is killed. If the folder for
    temporary files has a long path, it is made in ``/tmp``, as by Python 3.14: a worker that cannot open its
    socket sends nothing, and the loop would wait for it in vain.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(f"{usual}/pymp-12345678/listener-12345678")) > LONGEST_SOCKET and os.name == "posix":
        tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


def report_ended_workers() -> None:
    """Let torch's handler of SIGCHLD, which raises if a worker has failed, leave no lock taken.

    Python runs a handler between any two instructions of the main thread. If it raises where the lock of the
    queue to a worker was just taken, nobody returns that lock, and all who write to the queue wait for ever
    (``torch/utils/data/_utils/signal_handling.py``, ``multiprocessing/queues.py``).
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows no handlers
    # There is no public way to have torch's handler before the first loader writes to its queues.
    handling = getattr(torch.utils.data._utils, "signal_handling", None)
    getattr(handling, "_set_SIGCHLD_handler", lambda: None)()
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if callable(handler) and getattr(handler, "func", None) is not outside_locks:
        signal.signal(signal.SIGCHLD, partial(outside_locks, handler))


def outside_locks(
    handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None
) -> None:
    """Call a handler that may raise: now, or a little later if a lock is being taken."""
    if frame is not None and frame.f_code in TAKES_LOCK:
        threading.Timer(RETRY_S, os.kill, (os.getpid(), number)).start()
    else:
        handler(number, frame)


def start_worker(init: Callable[[int], object] | None, number: int) -> None:
    """Ignore the signals that ask the run to stop, end this worker with its parent, then call ``init``."""
    for stopping in STOPPING:
        signal.signal(stopping, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    end_with_parent()
    if init is not None:
        init(number)
