"""Loader workers: processes that fetch and join the micro-batches of the windows to come.

torch's own DataLoader over a view whose items are whole micro-batches, as one stream for the rest of the run:
the windows are drawn first and split afterwards, so what comes next is known. Where a window is run again in
smaller micro-batches, the stream begins anew at that window.

Workers ignore the signals that ask a run to stop: sent to the whole process group they would end the workers
first, and the checkpoint would never be written. The kernel ends them with this process.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import multiprocessing.resource_tracker
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import PIN_MEMORY, Configuration
from autobatch.core.signals import STOPPING
from autobatch.device.base import Device
from autobatch.device.oom import Verdict, classify
from autobatch.planning import micro_batches
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.feed import AHEAD, Feed, MicroBatchIds, SeededCollate, SeededFeed, parts_of
from autobatch.workload.nested import tensors_of
from autobatch.workload.order import GlobalBatch
from autobatch.workload.user_code import to_picklable

WAITS = ("connection.py", "selectors.py", "queue.py", "threading.py")
"""Modules of Python's that this process stands in while it waits for a micro-batch."""


GRACE_SECONDS = 1.0
"""How long a worker whose pipe broke may take to end."""


PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when the one that started it is gone."""


class LoaderWorkerCrashed(AutobatchError, RuntimeError):  # noqa: N818 - what became of it, not what went wrong
    """A loader worker ended; the message says how, and what helps."""


class WorkerFeed:
    """Micro-batches out of loader workers; see `autobatch.workload.loader.open_feed`.

    Args:
        join: fetches and joins one, in a worker.
        windows: the windows of the run from a number on.
        workers: processes.
        prefetch: micro-batches that each is ahead by.
        gpu: copy them to memory that this card can read by itself; ``None``: there is none.
    """

    def __init__(
        self,
        join: SeededCollate,
        windows: Callable[[int], Iterator[GlobalBatch]],
        *,
        workers: int,
        prefetch: int,
        gpu: torch.device | None = None,
    ) -> None:
        self._join = join
        self._train_batches = windows
        self._settings: dict[str, Any] = {
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "pin_memory": gpu is not None,
        }
        self._gpu = gpu
        self._context = multiprocessing.get_context(start_method())
        self._stop = self._context.RawValue(ctypes.c_bool, False)
        self._stream: Any = None
        self._workers: list[BaseProcess] = []
        self._at: tuple[int, int, int] | None = None
        """Window, number and size limit of the micro-batch that comes next."""
        self._chained: Any = None
        """Who was told before of processes that ended; ``None``: nobody can be told here."""
        self._is_waiting = False

    def collated(self, window: GlobalBatch, micro_batch: int) -> Iterator[Collated]:
        """See `autobatch.workload.feed.Feed`.

        Raises:
            InputError: the workload's data or collate raised in a worker.
            LoaderWorkerCrashed: a worker was killed, or crashed.
        """
        count = len(micro_batches(len(window.ids), micro_batch))
        if self._at != (window.index, 0, micro_batch):
            self._start(window.index, micro_batch)
        for number in range(1, count + 1):
            after = (window.index, number) if number < count else (window.index + 1, 0)
            # Kept in no variable: the loop alone holds a batch while it trains on it.
            yield self._take((*after, micro_batch))

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        stream, self._stream, self._at = self._stream, None, None
        if stream is None:
            return
        self._stop.value = True
        try:
            stream._shutdown_workers()
        finally:
            for process in self._workers:
                process.kill()
                process.join()
            self._workers = []
            if self._chained is not None:
                signal.signal(signal.SIGCHLD, self._chained)
                self._chained = None

    def _start(self, window: int, micro_batch: int) -> None:
        self.close()
        self._stop.value = False
        others = multiprocessing.active_children()
        may_listen = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")
        before = signal.getsignal(signal.SIGCHLD) if may_listen else None
        try:
            # The thread that copies for a card works on the current one.
            with _held_back(), nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
                self._stream = iter(self._loader(window, micro_batch))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the workload's data or collate cannot be sent to a loader worker ({error}): define them at "
                "the top of a module, or use --workers 0"
            ) from error
        self._workers = [one for one in multiprocessing.active_children() if one not in others]
        self._at = (window, 0, micro_batch)
        if may_listen:
            # In place of torch's, which raises wherever this process happens to be.
            self._chained = signal.SIG_DFL if before is None else before
            signal.signal(signal.SIGCHLD, self._note_ended)

    def _loader(self, window: int, micro_batch: int) -> DataLoader[Collated]:
        return DataLoader(
            _View(self._join, self._stop),
            batch_size=None,
            sampler=_Parts(self._train_batches, window, micro_batch),
            collate_fn=_as_it_is,
            worker_init_fn=_begin,
            # Of its own: the run's generators are not drawn from.
            generator=torch.Generator(),
            multiprocessing_context=self._context,
            **self._settings,
        )

    def _take(self, after: tuple[int, int, int]) -> Collated:
        self._check()
        self._is_waiting = True
        try:
            found = next(self._stream)
        except LoaderWorkerCrashed:
            raise
        except Exception as error:
            if isinstance(error, OSError | EOFError):
                # Pipes of one that is killed close a moment before it can be seen to have ended.
                gone = wait([process.sentinel for process in self._workers], timeout=GRACE_SECONDS)
                for process in self._workers:
                    if process.sentinel in gone:
                        process.join(GRACE_SECONDS)
            lost = self._lost()
            if lost is None:
                raise
            raise lost from error
        finally:
            self._is_waiting = False
        if isinstance(found, _Failure):
            raise found.error
        self._at = after
        return found

    def _note_ended(self, number: int, frame: Any) -> None:
        """Told of every process that ended; a wait for one that is gone would never end."""
        is_torchs = str(getattr(self._chained, "__module__", "")).startswith("torch.utils.data.")
        if callable(self._chained) and not is_torchs:
            self._chained(number, frame)
        # Elsewhere torch is at work on an error already, or the next wait sees it.
        if self._is_waiting and frame is not None and Path(frame.f_code.co_filename).name in WAITS:
            self._check()

    def _check(self) -> None:
        lost = self._lost()
        if lost is not None:
            raise lost

    def _lost(self) -> LoaderWorkerCrashed | None:
        for process in self._workers:
            if process.exitcode is not None:
                return LoaderWorkerCrashed(_crash_message(process.pid, process.exitcode))
        return None


def start_method() -> str | None:
    """How workers start; ``None``: as Python does by itself.

    Forked where that is sound, Linux: the data of a workload need then be of no module, and are not copied.
    """
    return "fork" if sys.platform == "linux" else None


def why_not_sent(join: SeededCollate, batch: Collated) -> str | None:
    """Why a workload cannot be fed by workers; ``None``: it can.

    Args:
        join: what a worker runs.
        batch: one of its micro-batches.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors_of(batch)):
        return "its samples lie on a card, and workers have none"
    try:
        if start_method() is None:
            _Check(io.BytesIO()).dump(join)
        _Check(io.BytesIO()).dump(batch)
    except Exception as error:
        return f"its samples cannot be sent from one process to another ({type(error).__name__}: {error})"
    return None


class _Parts:
    """The micro-batches of the rest of a run, in order: what torch calls a sampler."""

    def __init__(self, windows: Callable[[int], Iterator[GlobalBatch]], first: int, micro_batch: int) -> None:
        self._train_batches = windows
        self._first = first
        self._micro_batch = micro_batch

    def __iter__(self) -> Iterator[MicroBatchIds]:
        for window in self._train_batches(self._first):
            yield from parts_of(window, self._micro_batch)


class _View(Dataset[Any]):
    """Data whose items are whole micro-batches; lives in a worker."""

    def __init__(self, join: SeededCollate, stop: Any) -> None:
        self._join = join
        self._stop = stop

    def __getitem__(self, part: MicroBatchIds) -> Any:
        try:
            batch = self._join(part, is_asked=lambda: bool(self._stop.value))
            # What cannot be sent is dropped in silence by the queue, and would be waited for for ever.
            _check_sendable(batch)
        except (Exception, SystemExit) as error:
            if classify(error) is not Verdict.NONE:
                raise  # torch carries its type and text over, which is what recovery goes by
            return _Failure(to_picklable(error))
        return batch


@dataclass(frozen=True)
class _Failure:
    """What a worker sends in place of a micro-batch."""

    error: AutobatchError


class _Check(ForkingPickler):
    """Pickles all but the data of tensors, which go through shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, Tensor) else NotImplemented


def _check_sendable(batch: Collated) -> None:
    try:
        _Check(io.BytesIO()).dump(batch)
    except Exception as error:
        raise InputError(
            f"a micro-batch cannot be sent from a loader worker ({type(error).__name__}: {error}): let the "
            "collate return tensors in tuples, lists or dictionaries, or use --workers 0"
        ) from error


def _as_it_is(batch: Collated) -> Collated:
    """Leave a batch alone, where torch would turn its arrays into tensors."""
    return batch


def _begin(_: int) -> None:
    """First thing in a worker: be deaf to what asks the run to stop, and go when it goes."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _held_back() -> Iterator[None]:
    """Inside, signals that ask the run to stop wait; a worker that starts here does not see them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if start_method() != "fork":
        # Started here, for it lifts the block when it starts by itself.
        multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        with warnings.catch_warnings():
            # Python warns of a fork while threads run (a worker calls nothing of theirs), and torch of more
            # workers than cores: so many were asked for.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _crash_message(pid: int | None, code: int) -> str:
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    advice = "its own output stands above"
    if code == -signal.SIGKILL:
        advice = "where the host ran out of memory, fewer --workers or a smaller --prefetch helps"
    elif code == -getattr(signal, "SIGBUS", 0):
        advice = "where /dev/shm is full, a larger one (docker --shm-size) or a smaller --prefetch helps"
    return f"the loader worker {pid} ended ({how}): {advice}; --workers 0 fetches in this process"


def gpu_of(device: Device, knobs: Configuration) -> torch.device | None:
    """Return the GPU that `open_feed` pins memory for; None if the device or the knobs ask for none."""
    return device.torch_device if device.reads_pinned_memory and knobs.get(PIN_MEMORY, True) else None


@contextmanager
def open_feed(
    workload: Workload,
    windows: Callable[[int], Iterator[GlobalBatch]],
    *,
    seed: int,
    workers: int = 0,
    prefetch: int = AHEAD,
    sample_seeds: bool = False,
    gpu: torch.device | None = None,
) -> Iterator[Feed | None]:
    """Open what feeds a loop; its workers are gone afterwards.

    Args:
        workload: has the data and the collate.
        windows: the windows of the run from a number on.
        seed: of the run.
        workers: processes that fetch and join; 0: the loop does.
        prefetch: micro-batches that each is ahead by.
        sample_seeds: seed every sample by itself; with workers that is always so.
        gpu: copy what workers have joined to where this card can read it by itself, while it computes.

    Yields:
        ``None`` where the loop joins its own micro-batches, from the run's own generators.
    """
    join = SeededCollate(data=workload.train_data, collate=workload.collate, seed=seed)
    if not workers:
        yield SeededFeed(join) if sample_seeds else None
        return
    feed = WorkerFeed(join, windows, workers=workers, prefetch=prefetch, gpu=gpu)
    try:
        yield feed
    finally:
        feed.close()
