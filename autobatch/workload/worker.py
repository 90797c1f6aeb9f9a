"""Code that runs in a loader worker, the objects that it sends back, and how it starts."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.signals import STOPPING, end_with_parent
from autobatch.device.oom import Verdict, classify
from autobatch.workload.contract import Collated
from autobatch.workload.feed import SeededCollate
from autobatch.workload.split import MicroBatchIds
from autobatch.workload.user_code import to_picklable


def start_method() -> str | None:
    """Return the start method of workers; None for Python's default.

    It is fork on Linux, where that is safe: the workload need not be importable, and its data is not copied.
    """
    return "fork" if sys.platform == "linux" else None


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
            # The queue silently drops what it cannot pickle, and the loop would wait for it forever.
            _check_sendable(batch)
        except (Exception, SystemExit) as error:
            if classify(error) is not Verdict.NONE:
                raise  # torch sends its type and text to the loop, and the recovery needs both
            return Failure(to_picklable(error))
        return batch


@dataclass(frozen=True)
class Failure:
    """An error that a worker sends in place of a micro-batch."""

    error: AutobatchError


class _WithoutTensorData(ForkingPickler):
    """A pickler that skips the data of tensors, which goes through shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, Tensor) else NotImplemented


def check_picklable(value: object) -> None:
    """Pickle a value for another process, except for the data of its tensors.

    Raises:
        Exception: whatever pickling raises.
    """
    _WithoutTensorData(io.BytesIO()).dump(value)


def _check_sendable(batch: Collated) -> None:
    try:
        check_picklable(batch)
    except Exception as error:
        raise InputError(
            f"a micro-batch cannot be sent from a loader worker ({type(error).__name__}: {error}): let the "
            "collate function return tensors in tuples, lists or dictionaries, or use --workers 0"
        ) from error


def start_worker(init: Callable[[int], object] | None, number: int) -> None:
    """Ignore the signals that ask the run to stop, end this worker with its parent, then call ``init``."""
    for stopping in STOPPING:
        signal.signal(stopping, signal.SIG_IGN)
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    end_with_parent()
    if init is not None:
        init(number)
