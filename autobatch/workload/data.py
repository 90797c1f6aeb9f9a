"""The user's samples: fetch them, collate them, find the most expensive ones, and tell them from others.

A probe of the first samples may miss the longest one. It therefore runs the worst case: the largest
samples by the workload's `size_of`, or else by the count of numbers in a sample.

Data may differ between the processes of a run without a word: the order of a ``set`` or of ``listdir``, or a
split that nothing seeds. A digest tells them apart, of a few raw samples that are read twice under one seed.
If the readings differ, the values are random by nature, and nothing is claimed of them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from autobatch.core.errors import InputError
from autobatch.core.records import Record
from autobatch.device.host import cpu_name
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_generators, seeded
from autobatch.workload.user_code import mark_user_error, user_code

FIRST_LOOK = 64
"""Samples, spread over the data, that are read first."""
SCAN_SECONDS = 5.0
"""Time limit of a scan as long as all sizes are equal."""
LONG_SCAN_SECONDS = 60.0
"""Time limit of the scan if the sizes differ, or if a function gives them."""
MOST_SIZE = 1e15
"""Largest size of a sample: no more bytes fit anywhere, and the square of its sums is finite."""


def load_micro_batch(workload: Workload, ids: Sequence[int], name: str = "train_data") -> Collated:
    """Fetch samples of the data of this ``name`` by their indices and collate them, on the host.

    Raises:
        InputError: the samples cannot be collated; the message has the shapes found.
    """
    return collate_samples(fetch(getattr(workload, name), ids, name=name), workload.collate)


def fetch(data: Any, ids: Sequence[int], *, name: str = "train_data") -> list[Any]:
    """Read samples of map-style data, at once if it has ``__getitems__``, as torch's loader does.

    An error of the data is marked with their ``name`` and the index of the sample.
    """
    index: int | None = None
    try:  # one block for all samples, because a block of its own costs as much as reading one
        if not hasattr(data, "__getitems__"):
            samples = []
            for index in ids:
                samples.append(data[index])
            return samples
        return list(data.__getitems__(list(ids)))
    except (Exception, SystemExit) as error:
        mark_user_error(error, name if index is None else f"{name}[{index}]")
        raise


def collate_samples(samples: list[Any], collate: Callable[[list[Any]], Collated] | None) -> Collated:
    """Collate samples by the user's own function; None for torch's default.

    Raises:
        InputError: the samples cannot be collated; the message has the shapes found.
    """
    if collate is not None:
        with user_code("collate", collate):
            return collate(samples)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = sorted({str([tuple(t.shape) for t in tensors_of(sample)]) for sample in samples})
        if isinstance(error, RuntimeError) and len(shapes) == 1:
            raise  # the shapes are equal, so they are not the reason; memory may be
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the samples cannot be collated ({type(error).__name__}: {text}), found shapes "
            f"{', '.join(shapes[:3])}: give Workload(collate=…)"
        ) from error


class WorstCaseSampler:
    """The most expensive samples of the data, as micro-batches of any size.

    Args:
        workload: has the data, its collate function and ``size_of``.
        seed: of the data's random draws during the scan.
    """

    def __init__(self, workload: Workload, *, seed: int = 0) -> None:
        self._workload, self._data, self._seed = workload, workload.train_data, seed

    @cached_property
    def order(self) -> list[int]:
        """The samples that were read, the most expensive first."""
        return sorted(self._costs, key=lambda index: (-self._costs[index], index))

    @cached_property
    def _costs(self) -> dict[int, float]:
        """Cost of each sample by its index: of some that are spread over the data, then of all in time.

        They are read once, without a trace in the caller's generators.

        Raises:
            InputError: ``size_of`` returned no number from 0 to `MOST_SIZE`.
        """
        start, count = time.monotonic(), len(self._data)
        size_of = self._workload.size_of or elements
        spread = range(0, count, max(1, count // FIRST_LOOK))[:FIRST_LOOK]
        costs: dict[int, float] = {}
        limit = SCAN_SECONDS if size_of is elements else LONG_SCAN_SECONDS
        with seeded(self._seed):
            for index in chain(spread, range(count)):
                if index in costs:
                    continue
                if costs and time.monotonic() - start > limit:
                    break
                with user_code(f"train_data[{index}]"):
                    sample = self._data[index]
                with user_code("size_of", size_of):
                    costs[index] = float(size_of(sample))
                if not 0 <= costs[index] <= MOST_SIZE:
                    raise InputError(
                        f"Workload(size_of=…) returned {costs[index]:g} for sample {index}: it must return a "
                        f"finite number from 0 to {MOST_SIZE:g}, for example a length"
                    )
                if costs[index] != costs[0]:
                    limit = LONG_SCAN_SECONDS
        return costs

    @property
    def notes(self) -> list[str]:
        """Remarks on the scan, one per line."""
        read, count = len(self._costs), len(self._data)
        if read == count:
            return []
        sizes = "one size" if self.largest() is None else "different sizes"
        return [
            f"only {read:,} of {count:,} samples could be read in time, and have {sizes}: if others are "
            "larger, give Workload(size_of=…), with which all are read faster"
        ]

    def sizes(self) -> NDArray[np.float64] | None:
        """Return the cost of each sample by its index; None if the time limit left some unread."""
        costs, count = self._costs, len(self._data)
        return np.fromiter((costs[i] for i in range(count)), float, count) if len(costs) == count else None

    def take_sizes(self, sizes: NDArray[np.float64]) -> None:
        """Take the costs that another sampler of the same data has read."""
        self._costs = dict(enumerate(sizes.tolist()))

    def largest(self) -> tuple[int, float] | None:
        """Return the index and the cost of the most expensive sample; None if all costs are equal."""
        first, last = self.order[0], self.order[-1]
        return None if self._costs[first] == self._costs[last] else (first, self._costs[first])

    def check_collate(self) -> None:
        """Collate the most expensive sample with the cheapest, unless a sampler decides what is in a batch.

        A failure shows here, before a probe takes minutes.

        Raises:
            InputError: they cannot be collated.
        """
        if self._workload.sampler is None and self.largest() is not None:
            load_micro_batch(self._workload, [self.order[0], self.order[-1]])

    def batch(self, size: int) -> Collated:
        """Collate the ``size`` most expensive samples; repeat them if the data has fewer."""
        return load_micro_batch(self._workload, list(islice(cycle(self.order), size)))


def elements(sample: Any) -> int:
    """Count the numbers in a sample: elements of tensors, arrays, images and lists, characters of text."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping | list | tuple):
        return sum(map(elements, sample.values() if isinstance(sample, Mapping) else sample))
    size = getattr(sample, "size", None)
    if isinstance(size, int):  # an array
        return size
    if isinstance(size, tuple) and all(isinstance(edge, int) for edge in size):  # an image
        return math.prod(size)
    return sum(tensor.numel() for tensor in tensors_of(sample)) or 1


LOOKED_AT = 5
"""Samples that are read: the first, the last, and some between."""
DEEPEST = 8
"""Depth to which a nested sample is read."""


class DataDigest(Record, frozen=True, kw_only=True):
    """Digest of some samples of the training data."""

    samples: int
    """Number of samples in the data."""
    values: str
    """Digest of their values, which a decoder may round otherwise on another machine."""
    machine: str
    """Processor and version of torch that computed them."""


def digest_data(data: Any) -> DataDigest | None:
    """Read a few samples of map-style data, and leave the generators as they were.

    Returns:
        None if the same seed gives other values each time.
    """
    values = _read(data)
    if values != _read(data):
        return None
    return DataDigest(samples=len(data), values=values, machine=f"{cpu_name()}, torch {torch.__version__}")


def check_same_data(digests: Sequence[DataDigest | None], whose: Sequence[str]) -> None:
    """Check that all processes read the same training data as the first one.

    Args:
        digests: what each of them read; None if nothing tells its data from others.
        whose: names each of them, for example ``rank 1``.

    Raises:
        InputError: one of them reads others; names it.
    """
    first = digests[0]
    for digest, name in zip(digests[1:], whose[1:], strict=True):
        if first is None or digest is None:
            continue
        has_other_values = digest.machine == first.machine and digest.values != first.values
        if digest.samples != first.samples or has_other_values:
            raise InputError(
                f"the training data of {name} are not those of {whose[0]} in number, values or order "
                f"({digest.samples:,} samples, and {first.samples:,}). Usual causes: files that are listed "
                "unsorted (sort them), the order of a set (sort it, or set PYTHONHASHSEED=0), and a split or "
                "shuffle whose generator nothing seeds (give generator=)"
            )


def digest_of(samples: Any) -> str:
    """Return a digest of samples."""
    digest = hashlib.sha256()
    _add(samples, digest.update)
    return digest.hexdigest()[:16]


def _read(data: Any) -> str:
    """Return the digest of some samples that are read with seeded generators."""
    last = len(data) - 1
    places = sorted({last * part // (LOOKED_AT - 1) for part in range(LOOKED_AT)})
    with seeded(0), preserved_generators(data):
        samples = fetch(data, places)
    while isinstance(data, torch.utils.data.Subset):
        samples.append(np.asarray(data.indices))
        data = data.dataset
    return digest_of(samples)


def _add(value: Any, add: Callable[[bytes], None], depth: int = 0) -> None:
    """Add the content of a sample to a digest."""
    add(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype == object:  # its bytes are addresses
        value = value.tolist()
    if isinstance(value, Tensor | np.ndarray):
        add(f"{tuple(value.shape)}{value.dtype}".encode())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        # NumPy has no bfloat16.
        add(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping | list | tuple) and depth < DEEPEST:
        for child in value.items() if isinstance(value, Mapping) else value:
            _add(child, add, depth + 1)
    elif isinstance(value, Set):
        add(repr(sorted(map(repr, value))).encode())
    elif value is None or isinstance(value, str | bytes | int | float):
        add(repr(value).encode())
    elif callable(getattr(value, "tobytes", None)):  # an array or an image
        add(value.tobytes())
    elif hasattr(value, "__dict__") and depth < DEEPEST:
        _add(vars(value), add, depth + 1)
