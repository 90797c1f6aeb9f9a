"""Data that are read in their own order: iterable datasets, streaming data sets, generators.

A probe and a plan see the first samples of a stream as data with an index. Training reads the stream once
from its start, exactly one target batch per step. The samples of the current batch are kept until the next
one begins, so that a batch can run again.

A stream may draw from the global generators. It has states of its own for them, seeded in each epoch, so that
its draws depend on nothing but how much was read. Reading it again from its start gives the same samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload, is_stream, kind_of
from autobatch.workload.data_digest import digest_of
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    preserved_random_state,
    restore_random_state,
    seed_generators,
)
from autobatch.workload.user_code import user_code

SCAN = 1000
"""Samples that a plan looks at."""
IN_STREAM = -2
"""Takes the place of a batch in the seed of an epoch of a stream."""
END = object()
"""Takes the place of a sample at the end of an epoch."""
ENDLESS = 2**62
"""Length of a stream for the arithmetic of batches, in which nothing depends on its end."""
COMPARED = 8
"""Samples of each loader process that are compared with those of the others."""


class Prefix(list[Any]):
    """The first samples of a stream that has more, as data with an index."""


def scanned(workload: Workload, most: int | None = None) -> Workload:
    """Return a workload whose data are the first samples of its stream; another workload stays as it is.

    They are at most ``most`` samples; None for `SCAN`.

    Raises:
        InputError: the stream has no sample.
    """
    if not is_stream(workload.train_data):
        return workload
    most = most or SCAN
    with preserved_random_state():
        first = list(islice(StreamReader(workload.train_data).epoch(), most + 1))
    return replace(workload, train_data=first if len(first) <= most else Prefix(first[:most]))


def stream_notes(data: Any) -> list[str]:
    """Return a remark on what a plan has seen of a stream."""
    if not isinstance(data, Prefix):
        return []
    return [
        f"the data are a stream: this is planned from its first {len(data):,} samples. A larger sample may "
        "come later"
    ]


def length_of_stream(steps: int | None) -> int:
    """Return `ENDLESS`, after a check that a number of steps ends the run.

    Raises:
        InputError: nothing does.
    """
    if steps is None:
        raise InputError(
            "a stream does not tell how many samples an epoch has: give the number of optimizer steps, "
            "--steps N"
        )
    return ENDLESS


class StreamReader:
    """The samples of a stream of the user's over all epochs, read forward and only once.

    Args:
        stream: the user's.
        seed: of the run.
        share: gives what rank 0 has read to all ranks, which call it together; None for one process.
        reads: False for all ranks but 0.
    """

    def __init__(
        self,
        stream: Any,
        seed: int = 0,
        *,
        share: Callable[[list[Any]], list[Any]] | None = None,
        reads: bool = True,
    ) -> None:
        self._stream, self._seed, self._share, self._reads = stream, seed, share, reads
        self.workers: dict[str, Any] = {}
        """Loader processes that read, as arguments of a ``DataLoader``; empty for none."""
        self._random: RandomState | None = None
        """The generators as the stream left them; None before its first epoch begins."""
        self._epoch = self._in_epoch = 0
        """Number of the epoch, and of its samples that were read."""
        self._samples = chain.from_iterable(self.epoch() for _ in count())

    def epoch(self) -> Iterator[Any]:
        """Yield the samples of one epoch, from the generators that the seed and its number give.

        Raises:
            InputError: it has no sample, or each loader process yields the same ones.
        """
        seed_generators(self._seed, IN_STREAM, self._epoch, 0)
        self._in_epoch, looked_at = 0, list[str]()
        with user_code("train_data", self._stream):
            reader = iter(self._open())
        while True:
            with user_code(f"train_data at position {self._in_epoch}"):
                sample = next(reader, END)
            if sample is END:
                break
            if self._in_epoch < COMPARED * self.workers.get("num_workers", 0):
                looked_at.append(digest_of(sample))
                self._check_shared(looked_at)
            self._in_epoch += 1
            yield sample
        if not self._in_epoch:
            raise InputError(
                f"in epoch {self._epoch + 1} the stream of Workload(train_data=…) has 0 samples: at least 1 "
                "is needed. Give data that can be iterated in each epoch, or ask for fewer steps"
            )
        self._epoch += 1

    def read(self, number: int) -> list[Any]:
        """Return the next samples, as many as one batch has."""
        samples: list[Any] = []
        if self._reads:
            with self._drawing():
                samples = list(islice(self._samples, number))
        return samples if self._share is None else self._share(samples)

    def skip(self, samples: int) -> None:
        """Read samples, and hold none of them."""
        with self._drawing():
            deque(islice(self._samples, samples if self._reads else 0), maxlen=0)

    def state_dict(self) -> dict[str, int]:
        """Return the place in the stream."""
        return {"epoch": self._epoch, "in_epoch": self._in_epoch}

    def load_state_dict(self, state: dict[str, int]) -> list[str]:
        """Read again until a place in the stream, and say so."""
        self._epoch = state["epoch"]
        self.skip(state["in_epoch"])
        return [f"the first {state['in_epoch']:,} samples of the stream were read again and skipped"]

    def _check_shared(self, looked_at: list[str]) -> None:
        """Compare the first samples of loader processes, which take turns, by their digests.

        Raises:
            InputError: each process yields the same samples.
        """
        processes = self.workers["num_workers"]
        own = [looked_at[process::processes] for process in range(processes)]
        if processes > 1 and len(own[-1]) == COMPARED and own == own[:1] * processes and len({*own[0]}) > 1:
            raise InputError(
                f"each of {processes} loader processes yields the same samples, so that a run would train on "
                f"each {processes} times: let the stream share them by torch.utils.data.get_worker_info(), "
                "or use --workers 0"
            )

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let the stream draw from its own states of the CPU's generators within the block."""
        with preserved_random_state(gpus=False):
            if self._random is not None:
                restore_random_state(self._random)
            try:
                yield
            finally:
                self._random = capture_random_state(gpus=False)

    def _open(self) -> Any:
        """Return the object to iterate for the current epoch: of a data set that is told its number, or made.

        Raises:
            InputError: the user's function returns a batch, or loader processes cannot share what it makes.
        """
        source = self._stream
        set_epoch = getattr(source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        if not hasattr(source, "__iter__"):
            source = source()
            is_row = isinstance(source, tuple) and any(isinstance(part, Tensor) for part in source)
            if isinstance(source, Mapping) or is_row:
                raise InputError(
                    f"the function of Workload(train_data=…) returned {kind_of(source)} of {len(source)} "
                    "parts, which looks like a batch: write a function that yields its samples, for example "
                    "with `while True: yield from zip(*get_batch())`"
                )
            is_iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
            if not is_iterable or isinstance(source, str | bytes):
                raise InputError(
                    f"the function of Workload(train_data=…) returned {kind_of(source)}, which has no "
                    "samples: write a function that yields them, or returns what can be iterated"
                )
            if isinstance(source, DataLoader) and source.batch_sampler is not None:
                raise InputError(
                    f"the function of Workload(train_data=…) returned {kind_of(source)}, which yields "
                    "batches in place of samples: write Workload.from_loader(loader, …), or give its dataset"
                )
        if not self.workers:
            return source
        if not isinstance(source, IterableDataset):
            raise InputError(
                f"loader processes (--workers {self.workers['num_workers']}) cannot share the samples of "
                f"{kind_of(source)}: use --workers 0, or an IterableDataset"
            )
        # torch's default would turn its arrays into tensors.
        return DataLoader(source, batch_size=None, collate_fn=unchanged, **self.workers)


@dataclass(frozen=True, kw_only=True)
class StreamSampler(GlobalBatchSampler):
    """The batches of a run over a stream: the places of its samples, in order."""

    reader: StreamReader
    held: dict[int, Any] = field(default_factory=dict)
    """Samples of the current batch by their places, in place of the training data."""

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Read the batches of the run, from number ``start`` on, which is where the reader is."""
        for index in range(start, self.total):
            places = range(self.seen(index), self.seen(index + 1))
            self.held.clear()  # before the next samples take memory
            self.held.update(zip(places, self.reader.read(len(places)), strict=True))
            yield GlobalBatch(index, list(places))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream, between two batches."""
        return self.reader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """See `StreamReader.load_state_dict`."""
        assert state is not None
        return self.reader.load_state_dict(state)


def unchanged(sample: Any) -> Any:
    """Return a sample or a micro-batch unchanged; torch's default would turn its arrays into tensors."""
    return sample
