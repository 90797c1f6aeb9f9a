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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.workload.contract import Workload, is_stream, kind_of
from autobatch.workload.data import digest_of
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, sampler_of
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    preserved_random_state,
    restore_random_state,
    seed_cpu,
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


Share: TypeAlias = Callable[[Callable[[], list[Any]]], list[Any]]
"""Returns to all ranks, which call it together, what a function reads on one of them. A batch that runs again
in other shares, or is split by size, needs no further message."""


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
        first = list(islice(read_epoch(workload.train_data), most + 1))
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


def read_epoch(
    stream: Any, seed: int = 0, epoch: int = 0, workers: dict[str, Any] | None = None
) -> Iterator[Any]:
    """Yield the samples of one epoch, from the generators that the seed and its number give.

    Args:
        stream: the user's.
        seed: of the run.
        epoch: its number.
        workers: loader processes that read, as arguments of a ``DataLoader``; None or empty for none.

    Raises:
        InputError: it has no sample, or each loader process yields the same ones.
    """
    seed_cpu(seed, IN_STREAM, epoch, 0)
    with user_code("train_data", stream):
        reader = iter(_opened(stream, epoch, workers or {}))
    first, processes = list[str](), workers["num_workers"] if workers else 0
    for position in count():
        with user_code(f"train_data at position {position}"):
            sample = next(reader, END)
        if sample is END and position:
            return
        if sample is END:
            raise InputError(
                f"in epoch {epoch + 1} the stream of Workload(train_data=…) has 0 samples: at least 1 is "
                "needed. Give data that can be iterated in each epoch, or ask for fewer steps"
            )
        if position < COMPARED * processes:
            first.append(digest_of(sample))
        if processes > 1 and position == COMPARED * processes - 1:
            # Processes take turns.
            of_each = {tuple(first[process::processes]) for process in range(processes)}
            if len(of_each) == 1 and len({*first}) > 1:
                raise InputError(
                    f"each of {processes} loader processes yields the same samples, so that a run would "
                    f"train on each {processes} times: let the stream share them by "
                    "torch.utils.data.get_worker_info(), or use --workers 0"
                )
        yield sample


def _opened(source: Any, epoch: int, workers: dict[str, Any]) -> Any:
    """Return the object to iterate for an epoch: of a data set that is told its number, or made.

    Raises:
        InputError: the user's function returns a batch, or loader processes cannot share what it makes.
    """
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    if not hasattr(source, "__iter__"):
        source = source()
        is_row = isinstance(source, tuple) and any(isinstance(part, Tensor) for part in source)
        has_batches = isinstance(source, DataLoader) and source.batch_sampler is not None
        if is_row or has_batches or source is None or isinstance(source, Mapping | str | bytes):
            raise InputError(
                f"the function of Workload(train_data=…) returned {kind_of(source)}, which does not yield "
                "samples one by one: write a function that does, for example with `while True: yield from "
                "zip(*get_batch())`, or give the dataset of a loader"
            )
    if not workers:
        return source
    if not isinstance(source, IterableDataset):
        raise InputError(
            f"loader processes (--workers {workers['num_workers']}) cannot share the samples of "
            f"{kind_of(source)}: use --workers 0, or an IterableDataset"
        )
    return DataLoader(source, batch_size=None, collate_fn=unchanged, **workers)


@dataclass(kw_only=True)
class StreamSampler(GlobalBatchSampler):
    """The batches of a run over a stream, read forward and only once: the places of its samples, in order."""

    stream: Any
    share: Share = lambda read: read()
    workers: dict[str, Any] = field(default_factory=dict)
    """Loader processes that read, as arguments of a ``DataLoader``; empty for none."""
    held: dict[int, Any] = field(default_factory=dict)
    """Samples of the current batch by their places, in place of the training data."""
    _random: RandomState | None = None
    """The generators as the stream left them; None before its first epoch begins."""
    _epoch: int = 0
    _in_epoch: int = 0
    """Number of the epoch, and of its samples that were read."""

    def __post_init__(self) -> None:
        """Begin before the first epoch, which is opened with its first sample."""
        self._samples = self._over_epochs()

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Read the batches of the run, from number ``start`` on, which is where the stream is."""
        for index in range(start, self.total):
            places = range(self.seen(index), self.seen(index + 1))
            self.held.clear()  # before the next samples take memory
            self.held.update(zip(places, self.share(partial(self._read, len(places))), strict=True))
            yield GlobalBatch(index, list(places))

    def skip(self, samples: int) -> None:
        """Read samples, and hold none of them."""
        self.share(partial(self._read, samples, most_held=0))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream, between two batches."""
        return {"epoch": self._epoch, "in_epoch": self._in_epoch}

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """Read again until a place in the stream, and say so."""
        assert state is not None
        self._epoch = state["epoch"]
        self.skip(state["in_epoch"])
        return [f"the first {state['in_epoch']:,} samples of the stream were read again and skipped"]

    def _over_epochs(self) -> Iterator[Any]:
        while True:
            self._in_epoch = 0
            for sample in read_epoch(self.stream, self.seed, self._epoch, self.workers):
                self._in_epoch += 1
                yield sample
            self._epoch += 1

    def _read(self, samples: int, most_held: int | None = None) -> list[Any]:
        """Read so many samples, with the stream's own states of the CPU's generators."""
        with preserved_random_state(gpus=False):
            if self._random is not None:
                restore_random_state(self._random)
            try:
                return list(deque(islice(self._samples, samples), most_held))
            finally:
                self._random = capture_random_state(gpus=False)


def open_sampler(workload: Workload, stream: Any, options: Options, share: Share) -> GlobalBatchSampler:
    """Return the batches of a run, which are the same on all ranks.

    Args:
        workload: has the data with an index.
        stream: the data without one; None if they have one.
        options: the target batch, the seed, and the length of the run.
        share: gives the samples of a stream to all ranks.

    Raises:
        InputError: the sampler of the workload is invalid, or a run over a stream has no number of steps.
    """
    lengths: dict[str, Any] = {
        name: getattr(options, name) for name in ("target_batch", "seed", "steps", "epochs")
    }
    if stream is None:
        return sampler_of(workload, **lengths)
    return StreamSampler(**lengths, samples=length_of_stream(options.steps), stream=stream, share=share)


def unchanged(sample: Any) -> Any:
    """Return a sample or a micro-batch unchanged; torch's default would turn its arrays into tensors."""
    return sample
