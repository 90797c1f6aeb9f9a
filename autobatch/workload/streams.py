"""Data that are read in their own order: iterable datasets, streaming data sets, generators.

A probe and a plan see the first samples of a stream as data with an index. Training reads the stream once
from its start, exactly one target batch per step. The samples of the current batch are kept until the next
one begins, so that a batch can run again.

A stream may draw from the global generators. It has states of its own for them, seeded in each epoch, so that
its draws depend on nothing but how much was read. Reading it again from its start gives the same samples.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.workload.contract import BatchFunction, Unbatched, Workload, is_loader, is_stream, kind_of
from autobatch.workload.data_digest import digest_of
from autobatch.workload.nested import rows_of
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    plain_random_state,
    preserved_random_state,
    random_state_of,
    restore_random_state,
    seed_generators,
)
from autobatch.workload.user_code import place_of, user_code

SCAN = 1000
"""Samples that a plan looks at."""
IN_STREAM = -2
"""Takes the place of a batch in the seed of an epoch of a stream."""
IN_FUNCTION = -3
"""Takes the place of a batch in the seed of a batch of a user's function."""
ENDLESS = 2**62
"""Length of a stream for the arithmetic of batches if nothing depends on its end."""
COMPARED = 8
"""Samples of each loader process that are compared with those of the others."""
END = object()
"""Takes the place of a sample at the end of an epoch."""

_REFILLED = (
    ", which leaves out its shuffle buffer: the samples that it held are missing from this epoch, and the "
    "order of the others may differ from that of the uninterrupted run"
)


class Prefix(list[Any]):
    """The first samples of a stream, as data with an index.

    Args:
        samples: the samples.
        is_all: whether the stream ends after them.
    """

    def __init__(self, samples: Iterable[Any], *, is_all: bool) -> None:
        super().__init__(samples)
        self.is_all = is_all


def scanned(workload: Workload, target_batch: int | None = None, count: int | None = None) -> Workload:
    """Return a workload whose data are the first samples of its stream; another workload stays as it is.

    Args:
        workload: what to train.
        target_batch: samples that a `BatchFunction` is asked for, at most; None if unknown.
        count: samples to read; None for `SCAN`.

    Raises:
        InputError: the stream has no sample.
    """
    stream: Any = workload.train_data
    if not is_stream(stream):
        return workload
    count = count or SCAN
    size = min(count, target_batch or count)
    with preserved_random_state():
        found = list(islice(_first_epoch(stream, size), count + 1))
    return replace(workload, train_data=Prefix(found[:count], is_all=len(found) <= count))


def is_open_ended(data: object) -> bool:
    """Check for the first samples of a stream that has more."""
    return isinstance(data, Prefix) and not data.is_all


def stream_notes(data: Any, *, repeats: bool = True) -> list[str]:
    """Return a remark on what a plan has seen of a stream; nothing for other data.

    Args:
        data: of the plan.
        repeats: whether the loop runs a step again that runs out of memory.
    """
    if not is_open_ended(data):
        return []
    then = "; a step that runs out of memory runs again in smaller micro-batches" if repeats else ""
    return [
        f"the data are a stream: this is planned from its first {len(data):,} samples. A larger sample may "
        f"come later{then}"
    ]


COUNTED = (
    "epochs need the number of samples, so the stream is read once to its end: give the number of optimizer "
    "steps instead (--steps N) if that takes long, or if it has no end"
)
"""Remark on `count_samples`."""


def count_samples(stream: Any) -> tuple[int, list[str]]:
    """Read a stream once to its end; return the number of samples, and a remark if it says another one.

    Raises:
        InputError: it has no sample, or a `BatchFunction` has no end.
    """
    if isinstance(stream, BatchFunction):
        raise InputError(
            "a BatchFunction has no end, so its run cannot be counted in epochs: give the number of "
            "optimizer steps (--steps N)"
        )
    with preserved_random_state():
        samples = sum(1 for _ in _first_epoch(stream))
    try:
        said = len(stream)
    except TypeError:  # also torch's own way to say that the length is unknown
        said = samples
    if said == samples:
        return samples, []
    return samples, [
        f"the __len__ of the stream says {said:,} samples, and {samples:,} came: an epoch has these"
    ]


class Rows:
    """The samples of ready batches, which are taken apart along dimension 0.

    Args:
        source: yields the batches, and may have a state.
        data: of the user's, for messages and for what to do with a batch first.
        size: samples that each batch must have; None for any.

    Raises:
        InputError: a batch cannot be taken apart, or has another size.
    """

    def __init__(self, source: Any, data: Unbatched | BatchFunction, size: int | None = None) -> None:
        self._source, self._data, self._size = source, data, size
        self._left = 0
        """Samples of the latest batch that are still to be yielded."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of an epoch."""
        for batch in self._source:
            rows = self._rows(batch)
            for self._left in reversed(range(len(rows))):
                yield rows[~self._left]

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the source; None if it has none, or if samples of a batch are left."""
        saved = getattr(self._source, "state_dict", None)
        return saved() if callable(saved) and not self._left else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the source after a state."""
        self._source.load_state_dict(state)

    def _rows(self, batch: Any) -> list[Any]:
        convert = getattr(self._data, "convert", None)
        try:
            rows = rows_of(batch if convert is None else convert(batch))
        except InputError as error:
            raise InputError(
                f"a batch of {self._data} cannot be taken apart into samples: {error}. Let each part of a "
                "batch have one row per sample, or give data of single samples"
            ) from None
        if self._size not in (None, len(rows)):
            raise InputError(
                f"{self._data} was asked for {self._size:,} samples and returned {len(rows):,}: make a batch "
                "of the size that it gets as its first argument"
            )
        return rows


class DrawnBatches:
    """The batches of a function of the user's, one per optimizer step, without an end.

    Args:
        function: as for `BatchFunction`.
        size: samples of a batch.
        seed: of the run.
    """

    def __init__(self, function: Callable[[int, int], Any], size: int, seed: int) -> None:
        self._function, self._size, self._seed = function, size, seed
        self._step = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch of each step. The generators outside stay as they are."""
        while True:
            outside = capture_random_state()._replace(cuda=[])
            seed_generators(self._seed, IN_FUNCTION, self._step, 0)
            try:
                with user_code("train_data"):
                    batch = self._function(self._size, self._step)
            finally:
                restore_random_state(outside)
            self._step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a step."""
        self._step = state["step"]


class StreamView:
    """A stream as data with an index that only moves forward.

    Args:
        stream: the user's data.
        seed: of the run.
        target_batch: samples that a `BatchFunction` is asked for.
    """

    def __init__(self, stream: Any, seed: int = 0, target_batch: int = SCAN) -> None:
        self._stream = stream
        self._seed = seed
        self._target_batch = target_batch
        self._random: RandomState | None = None
        """The generators as the stream left them; None before its first epoch begins."""
        self._workers: dict[str, Any] = {}
        self._looked_at: list[tuple[str, str]] = []
        """Digests of the first samples of an epoch that loader processes read, in their turns."""
        self._source: Any = None
        """Object that has the state of the stream, and is iterated."""
        self._reader: Iterator[Any] | None = None
        self._held: dict[int, Any] = {}
        self._position = 0
        """Samples that were read so far."""
        self._epoch = 0
        self._in_epoch = 0

    def __len__(self) -> int:
        """Return a length that no run reaches."""
        return ENDLESS

    def __getitem__(self, position: int) -> Any:
        """Return the sample at a place of the run, reading as far as it takes.

        Raises:
            InputError: the stream yields nothing.
        """
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at some places of the run; see `__getitem__`."""
        stop = max(positions, default=-1) + 1
        if self._position < stop:
            with self._drawing():
                while self._position < stop:
                    self._held[self._position] = self._read()
                    self._position += 1
        return [self._held[position] for position in positions]

    def begin_batch(self, first: int, stop: int) -> None:
        """Forget the samples before a batch. Its own are read one by one when they are asked for."""
        del stop
        for old in [one for one in self._held if one < first]:
            del self._held[old]

    def skip(self, samples: int) -> None:
        """Go on after so many samples of the run, which are read, or counted if a function makes them."""
        if isinstance(self._stream, BatchFunction):
            step = {"step": samples // self._target_batch}
            place = {"position": samples, "epoch": 0, "in_epoch": samples}
            self.load_state_dict({**place, "own": step, "random": None})
            return
        with self._drawing():
            for self._position in range(1, samples + 1):
                self._read()

    def read_with(self, **workers: Any) -> None:
        """Read with loader processes: arguments of a ``DataLoader``; none to read in this process."""
        self._workers = workers

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream, and the stream's own state if it has one."""
        saved = getattr(self._source, "state_dict", None)
        own = saved() if callable(saved) else None
        place = {"position": self._position, "epoch": self._epoch, "in_epoch": self._in_epoch}
        # Without a state of its own, a stream is read again from its start, where it is seeded.
        random = None if own is None or self._random is None else plain_random_state(self._random)
        return {**place, "own": own, "random": random}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Continue after a state, and return in words how the place was found."""
        self._held.clear()
        self._position, self._epoch = state["position"], state["epoch"]
        self._in_epoch, self._reader = 0, None
        with self._drawing():
            if self._begin_epoch(state["own"]):
                self._in_epoch = state["in_epoch"]
                if state["random"] is not None:
                    restore_random_state(random_state_of(state["random"]))
                left_out = _REFILLED if forgets_order(self._stream) else ""
                return f"the stream continues from its own state{left_out}"
            for _ in range(state["in_epoch"]):
                self._read()
        within = ", or none within a batch" * isinstance(self._stream, Unbatched)
        return (
            f"the stream has no state_dict{within}, so its first {state['in_epoch']:,} samples were read "
            "again and skipped"
        )

    def _read(self) -> Any:
        """Return the next sample, of the next epoch after the end of one."""
        for _ in range(2):
            if self._reader is None:
                self._begin_epoch()
            assert self._reader is not None
            sample = _next(self._reader, self._in_epoch)
            if sample is not END:
                self._in_epoch += 1
                self._check_shared(sample)
                return sample
            self._reader, self._epoch, self._in_epoch = None, self._epoch + 1, 0
        raise InputError(
            f"the stream gave no sample in epoch {self._epoch}: give data that can be iterated again, or ask "
            "for fewer steps"
        )

    def _check_shared(self, sample: Any) -> None:
        """Look at the first samples of loader processes, which take turns.

        Raises:
            InputError: each process yields the same samples.
        """
        processes = self._workers.get("num_workers", 0)
        if processes < 2 or self._in_epoch > processes * COMPARED:
            return
        self._looked_at.append(digest_of(sample))
        own = [self._looked_at[process::processes] for process in range(processes)]
        is_same = len(own[-1]) == COMPARED and all(one == own[0] for one in own)
        if is_same and len(set(own[0])) > 1:
            raise InputError(
                f"each of {processes} loader processes yields the same samples, so that a run would train on "
                f"each {processes} times: let the stream share them by torch.utils.data.get_worker_info(), "
                "or use --workers 0"
            )

    def _begin_epoch(self, own: Any = None) -> bool:
        """Begin to read the current epoch; return whether the stream continued from its ``own`` state."""
        self._looked_at = []
        seed_generators(self._seed, IN_STREAM, self._epoch, 0)
        with user_code("train_data"):
            self._source = self._open()
            load: Any = getattr(self._source, "load_state_dict", None)
            continues = own is not None and callable(load)
            if continues:
                load(own)
            self._reader = iter(self._source)
        return continues

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let the stream draw from its own states of the CPU's generators within the block."""
        outside = capture_random_state()._replace(cuda=[])
        if self._random is not None:
            restore_random_state(self._random)
        try:
            yield
        finally:
            self._random = capture_random_state(self._random)._replace(cuda=[])
            restore_random_state(outside)

    def _open(self) -> Any:
        """Return the object to iterate for the current epoch."""
        read_with = self._by_workers if self._workers else None
        return open_epoch(self._stream, self._epoch, self._target_batch, self._seed, read_with=read_with)

    def _by_workers(self, stream: Any) -> Any:
        """Return a stream that loader processes read.

        Raises:
            InputError: it is a generator, which would yield all samples in each of them.
        """
        if inspect.isgenerator(stream):
            raise InputError(
                f"loader processes (--workers {self._workers['num_workers']}) cannot share the samples of a "
                f"generator function{place_of(stream)}: use --workers 0, or an IterableDataset"
            )
        loader: Any = DataLoader
        if find_spec("torchdata") is not None:  # its loader can tell where its processes are
            loader = import_module("torchdata.stateful_dataloader").StatefulDataLoader
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts of torch that torchdata still calls
            if is_loader(stream):
                return _in_order(stream, loader, **self._workers)
            return loader(stream, batch_size=None, collate_fn=unchanged, **self._workers)


@dataclass(frozen=True, kw_only=True)
class StreamSampler(GlobalBatchSampler):
    """The batches of a run over a stream: the places of its samples, in order."""

    view: StreamView

    def _order_of(self, epoch: int) -> range:
        return range(self.samples)

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Draw the batches of the run, from number ``start`` on. The view forgets those before."""
        for index in range(start, self.total):
            first = index * self.target_batch
            stop = first + self.size(index)
            self.view.begin_batch(first, stop)
            yield GlobalBatch(index, first // self.samples, list(range(first, stop)))

    def state_dict(self) -> dict[str, Any]:
        """See `StreamView.state_dict`."""
        return self.view.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """See `StreamView.load_state_dict`."""
        assert state is not None
        return [self.view.load_state_dict(state)]


def unchanged(sample: Any) -> Any:
    """Return a sample or a micro-batch unchanged; torch's default would turn its arrays into tensors."""
    return sample


def forgets_order(stream: object) -> bool:
    """Check for a shuffle buffer of Hugging Face ``datasets``, which its ``state_dict`` leaves out."""
    if "BufferShuffled" in type(stream).__name__:
        return True
    sources = [getattr(stream, name, None) for name in ("_ex_iterable", "ex_iterable", "stream")]
    sources += getattr(stream, "ex_iterables", None) or []
    return any(forgets_order(one) for one in sources if one is not None)


def _first_epoch(stream: Any, size: int = SCAN) -> Iterator[Any]:
    """Yield the samples of a stream's first epoch; ``size`` is what a `BatchFunction` is asked for.

    Raises:
        InputError: it has no sample.
    """
    with user_code("train_data"):
        reader = iter(open_epoch(stream, 0, size))
    position = 0
    while (sample := _next(reader, position)) is not END:
        position += 1
        yield sample
    if not position:
        raise InputError("the stream of Workload(train_data=…) has 0 samples: at least 1 is needed")


def _next(reader: Iterator[Any], position: int) -> Any:
    """Return the next sample, or `END`. An error is marked with the position of its sample."""
    with user_code(f"train_data at position {position}"):
        return next(reader, END)


def open_epoch(
    stream: Any, epoch: int, size: int, seed: int = 0, *, read_with: Callable[[Any], Any] | None = None
) -> Any:
    """Return the iterable of the samples of an epoch.

    Args:
        stream: of the user.
        epoch: its number, from 0.
        size: samples that a `BatchFunction` is asked for.
        seed: of the run, for a `BatchFunction`.
        read_with: returns the same stream, read by loader processes; None to read it here.
    """
    if isinstance(stream, BatchFunction):
        return Rows(DrawnBatches(stream.function, size, seed), stream, size)
    source = stream.stream if isinstance(stream, Unbatched) else stream
    if is_loader(source):
        source = source.dataset if is_stream(source.dataset) else _in_order(source)
    source = _at_epoch(source, epoch)
    source = source if read_with is None else read_with(source)
    return Rows(source, stream) if isinstance(stream, Unbatched) else source


def _in_order(loader: DataLoader[Any], kind: Any = DataLoader, **workers: Any) -> Any:
    """Return a loader of the same items in the same order, with other processes."""
    return kind(loader.dataset, sampler=loader.sampler, batch_size=None, collate_fn=unchanged, **workers)


def _at_epoch(stream: Any, epoch: int) -> Any:
    """Return the iterable of an epoch: of a data set that is told its number, or of a function.

    Raises:
        InputError: the function returns a batch.
    """
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    if hasattr(stream, "__iter__"):
        return stream
    made = stream()
    if isinstance(made, Mapping) or (
        isinstance(made, tuple) and any(isinstance(one, Tensor) for one in made)
    ):
        name = getattr(stream, "__name__", "get_batch")
        raise InputError(
            f"the function of Workload(train_data=…){place_of(stream)} returned {kind_of(made)} of "
            f"{len(made)} parts, which looks like a batch, and not like an iterable of samples: write "
            f"train_data=autobatch.BatchFunction(lambda size, step: …), and let {name} make size samples"
        )
    return made
