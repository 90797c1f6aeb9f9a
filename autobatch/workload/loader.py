"""The micro-batches of a run, from this process or from the worker processes of torch's ``DataLoader``.

With workers, a ``DataLoader`` reads a dataset whose items are whole micro-batches, as one stream for the rest
of the run. Batches are drawn first and split afterwards, so the coming micro-batches are known. If a batch
runs again in smaller micro-batches, the stream starts again at that batch.

Workers ignore the signals that ask the run to stop. A signal to the whole process group would otherwise end
the workers first, and the checkpoint would never be written. The kernel ends the workers with this process.
"""

from __future__ import annotations

import ctypes
import io
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import PIN_MEMORY, Configuration
from autobatch.core.signals import STOPPING, end_with_parent, hold_back_signals
from autobatch.device.base import Device
from autobatch.device.oom import Verdict, classify
from autobatch.workload.contract import Collated, Loading, Workload
from autobatch.workload.feed import AHEAD, Feed, SeededCollate, SeededFeed
from autobatch.workload.nested import tensors_of
from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import MicroBatchIds, Split
from autobatch.workload.user_code import to_picklable

BatchesFrom: TypeAlias = Callable[[int], Iterator[GlobalBatch]]
"""Returns the batches of the run, from a number on."""
TIME_LIMIT_S = 600.0
"""Longest wait for a micro-batch, generous enough for slow storage."""
POLL_S = 5.0
"""Interval at which a wait checks that all workers run."""
EXIT_S = 1.0
"""Time that a worker may take to end after its pipe broke."""
LONGEST_SOCKET = 107 if sys.platform == "linux" else 103
"""Bytes in the path of a socket (``sun_path`` in unix(7), without its final zero)."""


class LoaderWorkerCrashed(AutobatchError, RuntimeError):  # noqa: N818 - an event, as in ChildCrashed
    """A loader worker ended; the message says how, and what to do."""


class LoaderWorkerTimeout(AutobatchError, RuntimeError):  # noqa: N818 - an event, as LoaderWorkerCrashed
    """No loader worker sent a micro-batch in time."""


@contextmanager
def open_feed(
    workload: Workload,
    batches: BatchesFrom,
    *,
    seed: int,
    workers: int = 0,
    prefetch: int = AHEAD,
    sample_seeds: bool = False,
    gpu: torch.device | None = None,
    split: Split | None = None,
) -> Iterator[Feed | None]:
    """Open the feed of a loop, and end its workers at the end of the block.

    Args:
        workload: has the data and the collate function.
        batches: returns the batches of the run, from a number on.
        seed: of the run.
        workers: processes that fetch and collate; 0 to do so in the loop.
        prefetch: micro-batches that each worker is ahead by.
        sample_seeds: seed every sample; always on with workers.
        gpu: copy the workers' micro-batches to pinned memory for this GPU; None not to copy.
        split: forms the micro-batches; None for equal counts.

    Yields:
        None if the loop collates its own micro-batches, with the run's own generators.

    Raises:
        LoaderWorkerCrashed: a worker ended. torch raises its own error wherever the loop is at that moment.
    """
    split = split or Split()
    collate = SeededCollate(data=workload.train_data, collate=workload.collate, seed=seed)
    if not workers:
        yield SeededFeed(collate, split) if sample_seeds else None
        return
    options = {
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "worker_init_fn": partial(start_worker, workload.loading.init_worker),
    }
    feed = WorkerFeed(collate, batches, split, options, gpu)
    try:
        yield feed
    except Exception as error:
        crash = feed.crash(EXIT_S if isinstance(error, OSError | EOFError) else 0.0)
        if crash is None:
            raise
        raise crash from error
    finally:
        feed.close()


class WorkerFeed:
    """Micro-batches from loader workers.

    Args:
        collate: fetches and collates one micro-batch, in a worker.
        batches: returns the batches of the run, from a number on.
        split: forms the micro-batches.
        options: arguments of the ``DataLoader`` about its processes.
        gpu: copy micro-batches to pinned memory for this GPU; None not to copy.
    """

    def __init__(
        self,
        collate: SeededCollate,
        batches: BatchesFrom,
        split: Split,
        options: dict[str, Any],
        gpu: torch.device | None = None,
    ) -> None:
        self._collate = collate
        self._batches = batches
        self._split = split
        self._options = options
        self._gpu = gpu
        self._context = multiprocessing.get_context(start_method())
        self._stop = self._context.RawValue(ctypes.c_bool, False)
        self._workers: list[BaseProcess] = []
        self._stream: Any = None
        self._next: tuple[int, int] | None = None
        """Batch and size limit of the micro-batches that the stream yields next; None within a batch."""

    def collated(self, batch: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """See `autobatch.workload.feed.Feed`.

        Raises:
            InputError: the workload's data or collate function raised in a worker.
            LoaderWorkerTimeout: no worker sent a micro-batch for the time limit.
        """
        if self._next != (batch.index, micro_batch):
            self._start(batch.index, micro_batch)
        left = len(self._split.parts(batch, micro_batch))
        while left:
            left -= 1
            # Not kept in a variable, so that the loop alone holds a micro-batch while it trains on it.
            yield self._take(None if left else (batch.index + 1, micro_batch))

    def crash(self, seconds: float) -> LoaderWorkerCrashed | None:
        """Return the error of a worker that ended within the time; None if all of them run."""
        wait([process.sentinel for process in self._workers], seconds)
        for process in self._workers:
            if process.exitcode is not None:
                return LoaderWorkerCrashed(_crash_message(process.pid, process.exitcode))
        return None

    def close(self) -> None:
        """End the workers, even in the middle of their work."""
        stream, self._stream, self._next = self._stream, None, None
        self._stop.value = True
        # A traceback may hold the stream, which then cannot end its workers by its own deletion.
        getattr(stream, "_shutdown_workers", lambda: None)()
        for process in self._workers:
            process.kill()
            process.join()
        self._workers = []

    def _start(self, index: int, micro_batch: int) -> None:
        self.close()
        self._stop.value = False
        _open_socket_folder()
        others = multiprocessing.active_children()
        # The thread that pins memory uses the current GPU.
        on_gpu = nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)
        try:
            blocked = hold_back_signals(STOPPING, with_tracker=start_method() != "fork")
            with blocked, _worker_warnings_ignored(), on_gpu:
                self._stream = iter(self._loader(index, micro_batch))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the workload's data or collate function cannot be sent to a loader worker ({error}): "
                "define both at the top level of a module, or use --workers 0"
            ) from error
        self._workers = [process for process in multiprocessing.active_children() if process not in others]

    def _loader(self, index: int, micro_batch: int) -> DataLoader[Collated]:
        parts = (part for batch in self._batches(index) for part in self._split.parts(batch, micro_batch))
        return DataLoader(
            MicroBatchDataset(self._collate, self._stop),
            batch_size=None,
            sampler=parts,
            collate_fn=_unchanged,
            pin_memory=self._gpu is not None,
            timeout=POLL_S,
            # A generator of its own, so that the run's generators are not drawn from.
            generator=torch.Generator(),
            multiprocessing_context=self._context,
            **self._options,
        )

    def _take(self, following: tuple[int, int] | None) -> Collated:
        """Return the next micro-batch, after which the stream is at ``following``."""
        self._next = None
        for _ in range(math.ceil(TIME_LIMIT_S / POLL_S)):
            try:
                found = next(self._stream)
            except RuntimeError as error:
                # torch raises this after each poll; the stream then continues where it was.
                if not str(error).startswith("DataLoader timed out after"):
                    raise
            else:
                if isinstance(found, Failure):
                    raise found.error
                self._next = following
                return found
        raise LoaderWorkerTimeout(
            f"no loader worker sent the next micro-batch within {TIME_LIMIT_S:g} s, so the data or the "
            "collate function of the workload hangs: fetch without workers (--workers 0) to see where"
        )


def start_method() -> str | None:
    """Return the start method of workers; None for Python's default.

    It is fork on Linux, where that is safe: the workload need not be importable, and its data is not copied.
    """
    return "fork" if sys.platform == "linux" else None


def gpu_of(device: Device, knobs: Configuration, loading: Loading) -> torch.device | None:
    """Return the GPU that `open_feed` pins memory for; None if the device or the choices ask for none."""
    is_pinned = knobs.get(PIN_MEMORY, loading.pin_memory)
    return device.torch_device if device.reads_pinned_memory and is_pinned else None


def why_not_sent(collate: SeededCollate, batch: Collated) -> str | None:
    """Return why loader workers cannot feed a workload; None if they can.

    Args:
        collate: the function that a worker runs.
        batch: one of its micro-batches.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors_of(batch)):
        return "its samples are on a GPU, which workers cannot use"
    try:
        if start_method() is None:
            _check_picklable(collate)
        _check_picklable(batch)
    except Exception as error:
        return f"its samples cannot be sent from one process to another ({type(error).__name__}: {error})"
    return None


# In a worker


class MicroBatchDataset(Dataset[Any]):
    """A dataset whose items are whole micro-batches.

    Args:
        collate: fetches and collates one.
        stop: a shared flag; once it is set, an item is left unfinished.
    """

    def __init__(self, collate: SeededCollate, stop: Any) -> None:
        self._collate = collate
        self._stop = stop

    def __getitem__(self, part: MicroBatchIds) -> Collated | Failure:
        """Return a micro-batch, or the error of the workload that prevented it."""
        try:
            batch = self._collate(part, is_asked=lambda: bool(self._stop.value))
            # The queue silently drops what it cannot pickle, and the loop would wait for it in vain.
            _check_sendable(batch)
        except (Exception, SystemExit) as error:
            if classify(error) is not Verdict.NONE:
                raise  # torch sends its type and text to the loop, and the recovery needs both
            return Failure(to_picklable(error))
        return batch


@dataclass(frozen=True)
class Failure:
    """An error that a worker sends in place of a micro-batch, because torch keeps no notes and no cause."""

    error: AutobatchError


def start_worker(init: Callable[[int], object] | None, number: int) -> None:
    """Ignore the signals that ask the run to stop, end this worker with its parent, then call ``init``."""
    for stopping in STOPPING:
        signal.signal(stopping, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    end_with_parent()
    if init is not None:
        init(number)


class _WithoutTensorData(ForkingPickler):
    """A pickler that skips the data of tensors, which goes through shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, Tensor) else NotImplemented


def _check_picklable(value: object) -> None:
    _WithoutTensorData(io.BytesIO()).dump(value)


def _check_sendable(batch: Collated) -> None:
    try:
        _check_picklable(batch)
    except Exception as error:
        raise InputError(
            f"a micro-batch cannot be sent from a loader worker ({type(error).__name__}: {error}): let the "
            "collate function return tensors in tuples, lists or dictionaries, or use --workers 0"
        ) from error


def _unchanged(batch: Collated) -> Collated:
    """Return a micro-batch unchanged; torch's default would turn its arrays into tensors."""
    return batch


# Around the workers


def _open_socket_folder() -> None:
    """Make this process's folder for the sockets through which its workers send tensors.

    Without it, each worker makes one of its own, and a worker that is killed leaves it behind. If the folder
    for temporary files has a long path, it is made in ``/tmp``, as by Python 3.14: a worker that cannot open
    its socket sends nothing.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(f"{usual}/pymp-12345678/listener-12345678")) > LONGEST_SOCKET and os.name == "posix":
        tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


@contextmanager
def _worker_warnings_ignored() -> Iterator[None]:
    """Ignore within the block the warnings about workers that the user asked for."""
    with warnings.catch_warnings():
        # Python warns of a fork while threads run, but a worker uses none of their objects.
        warnings.simplefilter("ignore", DeprecationWarning)
        # torch warns of more workers than CPUs, but this number was asked for.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        # It also warns of what it cannot pickle, and raises the error.
        warnings.filterwarnings("ignore", message="Got pickle error", category=UserWarning)
        yield


def _crash_message(pid: int | None, code: int) -> str:
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    advice = "see its output above"
    if code == -signal.SIGKILL:
        advice = "use fewer --workers or a smaller --prefetch if the host ran out of memory"
    elif code == -getattr(signal, "SIGBUS", 0):
        advice = "use a larger /dev/shm (docker --shm-size) or a smaller --prefetch if /dev/shm is full"
    return f"loader worker {pid} ended with {how}: {advice}, or fetch without workers (--workers 0)"
